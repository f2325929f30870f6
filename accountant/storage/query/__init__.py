"""Usage windows from the ledger: stretches of quarter-hours, remembered, read ahead, decayed and put in proportion."""
