"""Reads the pages that a running agent serves."""

from __future__ import annotations

import http.client


def asked(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def stopped(port: int) -> dict[str, float]:
    """Return the values of `gputally_task_stopped` by task."""
    lines = asked(port, "/metrics")[1].splitlines()
    shown = [line.split() for line in lines if line.startswith("gputally_task_stopped{")]
    return {series.split('"')[1]: float(value) for series, value in shown}
