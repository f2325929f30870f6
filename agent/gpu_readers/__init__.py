"""Reads GPUs: a module or a folder for each source (the NVIDIA driver, dcgm-exporter).

This package does not know pods or Kubernetes."""
