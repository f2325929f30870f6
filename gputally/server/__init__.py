"""Who calls, and what they may: tokens of our own, issuers', the API server's."""
