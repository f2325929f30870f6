"""Selects pods to preempt, stops them, and follows each preemption to its end."""
