"""Reads GPUs: a module or a folder for each source (a driver, an exporter).

This package does not know pods or Kubernetes."""
