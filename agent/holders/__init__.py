"""Finds the holder of each device, and the facts of the pods among the holders.

A module or folder stands for each source and each way to share GPUs; `protocol` says what it brings."""
