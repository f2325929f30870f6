"""The live table of `gputally agent top` and `--watch`: one picture of a node, its trend and its price per hour."""
