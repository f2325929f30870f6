"""The fairshare controller: computes queue weights and preemptions from usage history."""
