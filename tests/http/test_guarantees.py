"""What queues are guaranteed, over HTTP."""

from __future__ import annotations

from pathlib import Path

from accountant.composition import Service
from gputally.base.clock import VirtualClock
from tests.http.conftest import INVENTORY, client_of, settings_in


def test_without_records_the_gpus_in_service_are_unknown(tmp_path: Path, clock: VirtualClock) -> None:
    with Service(settings_in(tmp_path, inventory=INVENTORY), clock) as service:
        found = client_of(service).get("/v1/guarantees").json()
    assert (found["gpus"], found["coverage"], found["queues"]) == (None, None, [])
    assert 0 <= found["start_ms"] < found["end_ms"]
