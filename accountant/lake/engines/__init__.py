"""The query engines that can read the lake: a folder for each.

Read `protocol` first: an engine answers SQLGlot queries over the lake's tables. `trino` is the shortest example. The
manifest of an engine is in the `__init__` of its folder, so that a list of engines loads no library. An engine of
another package is chosen in the same way (docs/plugins/engine.md), and runs behind `guard`."""
