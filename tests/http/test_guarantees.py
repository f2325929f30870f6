"""What queues are guaranteed, over HTTP."""

from __future__ import annotations

from pathlib import Path

import yaml

from accountant.composition import Service
from gputally.base.clock import VirtualClock
from tests.http.conftest import INVENTORY, client_of, settings_in
from tests.seams.site import A100, HOUR_MS, hours_of, site
from tests.seams.small_month import BEGIN_MS, at, running


def test_without_records_the_gpus_in_service_are_unknown(tmp_path: Path, clock: VirtualClock) -> None:
    with Service(settings_in(tmp_path, inventory=INVENTORY), clock) as service:
        found = client_of(service).get("/v1/guarantees").json()
    assert (found["gpus"], found["coverage"], found["queues"]) == (None, None, [])
    assert 0 <= found["start_ms"] < found["end_ms"]


def test_each_queue_tells_what_it_is_guaranteed_holds_and_has_above_that_by_gpu_model(tmp_path: Path) -> None:
    deserved = {"vision": {"H100": 1.5}, "nlp": {"H100": -1}, "ops": {"H100": 2, "A100": 0.5}}
    queues = [
        {
            "name": name, "team": name, "refs": [f"kai:{name}"],
            "gpu_models": {model: {"deserved": gpus} for model, gpus in of.items()},
        }
        for name, of in deserved.items()
    ]  # fmt: skip
    holders = {"A": "vision", "B": "vision", "C": "vision", "D": "nlp", "E": "ops"}
    rows = [row for gpu, of in holders.items() for row in hours_of(gpu, at(0), 1, f"{of}/{gpu.lower()}")]
    pods = [running(f"{of}/{gpu.lower()}", at(0), "Job/x", queue_ref=f"kai:{of}") for gpu, of in holders.items()]
    policy = yaml.safe_dump({"schema": 1, "queues": queues})
    with site(tmp_path, VirtualClock(BEGIN_MS + HOUR_MS), policy=policy) as accountant:
        accountant.send([*rows, *hours_of("F", at(0), 1, "ops/e", gpu_model=A100), *hours_of("G", at(0), 1)], pods)
        found = accountant.get("/v1/guarantees")
    assert (found["gpus"], found["coverage"]) == ("7", 1)
    assert {
        (one["queue"], one["gpu_model"]): (one["guaranteed_gpus"], one["held_gpus"], one["above_gpus"])
        for one in found["queues"]
    } == {
        ("vision", "H100"): ("1.5", "3", "1.5"), ("nlp", "H100"): (None, "1", "0"),
        ("ops", "H100"): ("2", "1", "0"), ("ops", "A100"): ("0.5", "1", "0.5"),
    }  # fmt: skip
