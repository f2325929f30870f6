"""Selects pods to preempt, asks their owners to stop them, and follows each preemption to its end."""
