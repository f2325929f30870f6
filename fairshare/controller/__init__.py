"""Runs the control loop: computes and applies weights, adopts fields and restores base weights."""
