"""Defines the settings, readings, clock and files that every package of the agent uses."""
