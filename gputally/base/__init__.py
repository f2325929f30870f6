"""Provides what the programs share: units, clock, errors, files, command output and HTTP calls.

The agent's image has no httpx2, so the agent does not import `http_calls`, `accountant_connection` and
`prometheus_api`."""
