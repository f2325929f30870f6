"""Collects what is known of nodes, namespaces and pods from files, the API server and Slurm."""
