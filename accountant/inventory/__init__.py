"""What is known of nodes, namespaces and pods: from files, from an API server, from Slurm."""
