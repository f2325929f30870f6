"""Reads the price book and decides which price applies to a GPU at an instant."""
