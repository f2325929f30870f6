"""Defines the accountant's subcommands; `accountant.__main__` registers them."""
