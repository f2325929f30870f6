"""Defines the time arithmetic, settings and errors that all packages of the accountant use."""
