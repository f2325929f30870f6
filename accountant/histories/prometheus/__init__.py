"""Imports what dcgm-exporter and kube-state-metrics left in a Prometheus server."""
