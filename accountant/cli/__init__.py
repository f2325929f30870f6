"""The accountant's subcommands, by what they are about; `accountant.__main__` puts them together."""
