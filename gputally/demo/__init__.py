"""Implements `gputally demo`: a simulated cluster, metered, billed and steered by the real agents, accountant and
controller on a virtual clock."""
