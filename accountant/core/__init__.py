"""Defines the values, settings, files and errors that all packages of the accountant use."""
