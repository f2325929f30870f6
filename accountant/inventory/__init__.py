"""Collects facts about nodes, namespaces and pods from files, the API server and Slurm."""
