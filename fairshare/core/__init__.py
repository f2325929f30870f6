"""What the controller knows of Kubernetes: kinds, quantities, pods, field ownership, and an API server in memory."""
