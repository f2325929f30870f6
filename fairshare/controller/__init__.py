"""Runs the control loop: applies planned weights, takes over objects and restores them."""
