"""Grafana dashboards and Prometheus rules, built from Python and committed as JSON."""
