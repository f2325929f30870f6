"""What the ledger tells Prometheus, for people to watch: bills and weights come from the ledger alone."""
