"""Reads the GPU driver: devices, processes, MIG instances, power and errors, through NVML, GPM and accounting mode.

This package does not know pods or Kubernetes. Only `agent.gpu_readers.nvml.nvml_library` calls the library."""
