"""Implements `gputally doctor`: looks for common faults and reports each with its figures and its remedy.

Collectors read facts, and one module per subject turns them into findings. A check that cannot run reports why and does
not affect the others. The doctor changes nothing."""
