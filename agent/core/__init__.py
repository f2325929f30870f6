"""Defines the settings, clock and files that every room of the agent uses."""
