"""Answers queries about several ledgers of one lake, with the same code as for a single ledger."""
