"""Writes a report as a file: a module or a folder for each format, and the process in which documents are made.

Read `protocol` first: an export writes a `Report` to a stream. `json` is the shortest example. The manifest of a format
that needs a library is in the `__init__` of its folder, so that a list of formats loads no library. A format of another
package is chosen in the same way (docs/plugins/export.md)."""
