"""Finds which pod holds each device, and reads what Kubernetes says about that pod.

Read from the kubelet and, by list and watch of this node's objects only, from the API server: plain HTTPS, no client
library.
"""
