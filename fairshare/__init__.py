"""The fairshare controller: usage history in, effective queue weights and preemptions out."""
