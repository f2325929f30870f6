"""What people are told: why a queue has what it has, a past decision computed again, one policy beside another."""
