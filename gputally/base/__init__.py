"""Holds what every stage shares: units, clock, files, output and errors.

It needs only the standard library, msgspec and PyYAML."""
