"""What leaves the ledger's file and what comes back: archive, frozen rows, copies, and the log that may be torn."""
