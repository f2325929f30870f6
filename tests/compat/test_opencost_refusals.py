"""What OpenCost's API does not answer, and how it says so: in the shape that its clients read."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from accountant.compat.opencost_api import AllocationSource, create_app
from accountant.core.settings import Limits
from tests.compat.opencost_listener import DAY, Port


def test_services_are_not_known_and_that_is_said(port: Port) -> None:
    body = port.get(aggregate="service")
    assert set(body["data"][0]) == {"__unallocated__"}
    assert body["warning"] == "services are not known to the ledger"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"window": ""}, "Invalid 'window' parameter: ''"),
        ({"window": "1w offset"}, "Invalid 'window' parameter"),
        ({"window": "9999d"}, "Invalid 'window' parameter: longer than 400 days"),
        ({"window": "1,2", "aggregate": "annotation:"}, r"Invalid 'aggregate' parameter: 'annotation:'"),
        ({"aggregate": "pid"}, "expected all, cluster, "),
        ({"aggregate": ",".join(f"label:a{i}" for i in range(13))}, "more than 12 names"),
    ],
)
def test_bad_windows_and_keys_are_refused_in_plain_text(port: Port, asked: dict[str, str], reason: str) -> None:
    answer = port.client.get("/allocation", params={"window": DAY, **asked})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert reason in answer.text


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"filter": "namespace"}, "Error: filter: the end: expected more"),
        ({"filter": 'image:"y"'}, "unknown property 'image'"),
        ({"step": "1s"}, "Error: step: '1s': expected a duration such as 1h or 1d"),
        ({"step": "1m"}, "more than 800 steps"),
        ({"window": "2026-01-01T00:00:00Z,2026-10-01T00:00:00Z", "accumulate": "hour"}, "more than 800 sets"),
        ({"accumulate": "year"}, "expected true, false, hour"),
        ({"includeIdle": "maybe"}, "Error: includeIdle: 'maybe'"),
        ({"includeProportionalAssetResourceCosts": "true"}, "not answered here"),
        ({"format": "xml"}, "Error: format: 'xml': expected json or csv"),
        ({"filterServices": "web"}, "Error: filterServices: this filter is not known here; use filter, or filterClus"),
        ({"sort": "cpuCost"}, "Error: sort: 'cpuCost': expected name, totalCost"),
        ({"order": "up"}, "Error: order: 'up': expected asc or desc"),
        ({"limit": "-1"}, "Error: limit: '-1': expected a whole number"),
        ({"shareIdle": "even"}, "Error: shareIdle: 'even': expected true or false"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_opencosts_shape(port: Port, asked: dict[str, str], message: str) -> None:
    answer = port.client.get("/allocation", params={"window": DAY, **asked})
    body = answer.json()
    assert (answer.status_code, body["code"], body["status"], body["data"]) == (400, 400, "", None)
    assert message in body["message"]


def test_bytes_that_are_no_text_and_too_many_parameters_are_refused(port: Port) -> None:
    assert port.client.get("/allocation?window=%ff").status_code == 400
    assert port.client.get("/allocation?" + "a=b&" * 100).status_code == 400


def test_a_ledger_that_cannot_be_read_is_told_in_opencosts_shape(port: Port) -> None:
    from accountant.core.errors import LedgerUnavailable

    class Away:
        def gpu_hours(self, start_ms: int, end_ms: int, cluster: str | None = None) -> int:
            return 1

        def pods(self, start_ms: int, end_ms: int, *, placed: bool) -> Any:
            raise LedgerUnavailable("the disk is full")

    source = AllocationSource(Away(), port.clock, lambda: None, "prod", Limits(span_days=400))  # type: ignore[arg-type]
    answer = TestClient(create_app(source)).get("/allocation", params={"window": DAY})
    assert answer.status_code == answer.json()["code"] == 503
    assert "the disk is full" in answer.json()["message"]


@pytest.mark.parametrize("path", ["/allocation", "/allocation/summary", "/assets"])
def test_a_window_that_adds_up_too_much_is_refused_before_it_is_read(port: Port, path: str) -> None:
    class Large:
        """Nothing of it can be read: a question that goes on meets an AttributeError."""

        def gpu_hours(self, start_ms: int, end_ms: int, cluster: str | None = None) -> int:
            return (end_ms - start_ms) // 3_600_000 * 1_000

    limits = Limits(question_gpu_hours=24_000)
    source = AllocationSource(Large(), port.clock, lambda: None, "prod", limits)  # type: ignore[arg-type]
    answer = TestClient(create_app(source)).get(path, params={"window": DAY, "aggregate": "cluster,namespace"})
    assert answer.status_code == 400
    assert (
        "48000 GPU-hours to add up (times 2 dimensions), and 24000 are the most: ask for about 12 hours" in answer.text
    )
