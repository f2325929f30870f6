"""Defines the settings, readings, clocks and HTTP client that the packages of the agent share."""
