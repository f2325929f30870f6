"""The histories that gputally brings: a folder for each other system, which holds all that is known about it.

Read `accountant.history_import.protocol` first. `prometheus/command.py` and `slurm/command.py` have the manifests, the
options and the messages; the other modules of a folder read the records. A history of another package is chosen in the
same way (docs/plugins/history.md)."""
