"""Imports the allocations in Slurm's accounting, and the names of its jobs."""
