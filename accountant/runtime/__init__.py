"""Runs a serving accountant: ingest, background tasks, leader election, clock check, and metrics of jobs and tasks."""
