"""Implements `gputally doctor`, which looks for common faults and reports each with its figures and its remedy.

`check_inputs` reads the facts, and one module per subject turns them into findings. A check that cannot run reports why
and does not affect the others. The doctor changes nothing."""
