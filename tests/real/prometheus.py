"""A real Prometheus 3 on the loopback that scrapes a test's server or holds back-filled samples.

scripts/prometheus.sh builds the programs once from their Go module and caches them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.real.programs import built, free_ports, running, wait_ready


@dataclass(frozen=True)
class Prometheus:
    """A running server and its process."""

    url: str
    pid: int

    def instant(self, query: str, at: float) -> list[dict[str, Any]]:
        """Return the series of an instant query at `at` (seconds since the epoch)."""
        return self._ask("query", {"query": query, "time": f"{at:.3f}"})

    def range(self, query: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of a range query; `start`, `end` and `step` in seconds."""
        span = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        return self._ask("query_range", {"query": query, **span})

    def _ask(self, endpoint: str, parameters: Mapping[str, str]) -> list[dict[str, Any]]:
        body = urllib.parse.urlencode(parameters).encode()
        with urllib.request.urlopen(f"{self.url}/api/v1/{endpoint}", data=body, timeout=120) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found


def promtool(*arguments: str, cwd: Path) -> str:
    """Run promtool and return its output. Raises RuntimeError with the output if it reports a fault."""
    done = subprocess.run(
        [str(built("prometheus.sh") / "promtool"), *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"promtool {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def backfill(openmetrics: str, folder: Path) -> Path:
    """Write blocks of timestamped OpenMetrics text (which ends in `# EOF`) to the data folder of a server that starts
    later."""
    text = folder / "history.om"
    text.write_text(openmetrics)
    promtool("tsdb", "create-blocks-from", "openmetrics", str(text), str(folder / "data"), cwd=folder)
    return folder / "data"


@contextlib.contextmanager
def prometheus(
    folder: Path, configuration: Mapping[str, object] | None = None, arguments: Sequence[str] = ()
) -> Iterator[Prometheus]:
    """Run a server on `folder`/data until the block ends. configuration: prometheus.yml as a mapping."""
    (port,) = free_ports(1)
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(dict(configuration or {})))
    command = [
        str(built("prometheus.sh") / "prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=100y",  # what a test back-fills may lie years ago
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
        *arguments,
    ]
    url = f"http://127.0.0.1:{port}"
    with running(command, folder / "prometheus.log") as process:
        wait_ready(f"{url}/-/ready", process, folder / "prometheus.log")
        yield Prometheus(url, process.pid)
