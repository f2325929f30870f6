"""Answers questions about several ledgers of one lake, by the code that answers them on one machine."""
