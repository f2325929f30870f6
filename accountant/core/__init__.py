"""Defines the values, settings, files and errors that every room of the accountant uses."""
