"""Who gives way to whom, how he is asked to go, and what became of it."""
