"""What Prometheus is told: a second view of the rows that are billed."""
