"""Commands of `gputally fairshare` that need room of their own."""
