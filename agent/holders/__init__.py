"""Finds which pod holds each device, and reads what Kubernetes says about that pod.

The sources are the kubelet and the API server, from which it lists and watches only this node's objects, over plain
HTTPS without a client library."""
