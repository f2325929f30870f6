"""Defines the subcommands of `gputally fairshare`."""
