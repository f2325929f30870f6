"""Implements `gputally doctor`: looks for common faults and reports each with its figures and its remedy.

Collectors read facts, pure modules turn them into findings, one module per subject. A check that cannot run says why
and does not affect the others. Nothing is changed.
"""
