"""Finds the holder of each device, and reads the facts of the pods among the holders.

On Kubernetes the sources are the kubelet and the API server. The package lists and watches only this node's objects,
over plain HTTPS without a client library."""
