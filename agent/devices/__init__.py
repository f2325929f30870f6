"""The GPU driver's side of a node: devices, processes, MIG and power as NVML, GPM and accounting mode tell them.

Nothing here knows of pods or Kubernetes, and nothing but `agent.devices.nvml_library` calls the library.
"""
