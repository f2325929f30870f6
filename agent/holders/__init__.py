"""The Kubernetes side of a node: which pod was given which device, and what is known of that pod.

Read from the kubelet and, by list and watch of this node's objects only, from the API server: plain HTTPS, no client
library.
"""
