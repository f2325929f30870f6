"""The histories that gputally brings: a folder for each other system, which holds all that is known about it.

Read `accountant.history_import.protocol` first. The module `command` of a folder has the manifest, the options and the
messages; the other modules read the records. A history of another package is chosen in the
same way (docs/plugins/history.md)."""
