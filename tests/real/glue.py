"""AWS Glue's data catalog on the loopback: moto's server, plus the optimistic locking that AWS documents and moto
lacks.

`UpdateTable` fails with ConcurrentModificationException if its `VersionId` is not the table's current one."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.real.programs import free_ports, running, wait_ready


@contextlib.contextmanager
def glue(folder: Path) -> Iterator[dict[str, str]]:
    """Run a server until the block ends. Yields PyIceberg's properties for it."""
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", folder / "glue.log"
    with running([sys.executable, str(Path(__file__)), str(port)], log) as process:
        wait_ready(f"{url}/moto-api/", process, log)
        yield {
            "glue.endpoint": url,
            "glue.region": "us-east-1",
            "glue.access-key-id": "tests",
            "glue.secret-access-key": "tests",
        }


def serve(port: str) -> None:
    from moto.core.exceptions import ServiceException
    from moto.glue.models import FakeTable
    from moto.glue.responses import GlueResponse
    from moto.server import main

    update_table, lock = GlueResponse.update_table, threading.Lock()

    def update_locked(response: Any) -> Any:
        version, name = response.parameters.get("VersionId"), response.parameters["TableInput"]["Name"]
        with lock:
            table: FakeTable = response.glue_backend.get_table(response.parameters["DatabaseName"], name)
            if version is not None and version != table.as_dict()["VersionId"]:
                raise ServiceException("ConcurrentModificationException", f"{name} is no longer at version {version}")
            return update_table(response)

    GlueResponse.update_table = update_locked  # type: ignore[method-assign]
    main(["-p", port])


if __name__ == "__main__":
    serve(sys.argv[1])
