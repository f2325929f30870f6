"""Defines the settings, readings, clock and files that every room of the agent uses."""
