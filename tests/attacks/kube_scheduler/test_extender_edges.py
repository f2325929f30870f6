"""Every field of a scheduler's request at the edges of its values: an answer, or a refusal with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from fairshare.http_server import serve_extender
from fairshare.schedulers.kube_scheduler.extender import KubeSchedulerExtender
from fairshare.targets.extender import ExtenderView
from fairshare.targets.pod_index import PodIndex
from gputally.base.clock import VirtualClock
from tests.attacks.edges import mutations
from tests.fairshare.builders import node_object, pod_object
from tests.hypothesis_examples import examples

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]


@pytest.fixture(autouse=True)
def _quiet(logs: list[Any]) -> None:
    """Log nothing to the terminal."""


@pytest.fixture(scope="module")
def extender() -> Iterator[str]:
    view = ExtenderView({"n1": 8.0, "n2": 8.0}, PodIndex())
    with serve_extender("127.0.0.1", 0, KubeSchedulerExtender(lambda: view, VirtualClock(0)).routes) as url:
        yield url


POD = pod_object("p", gpus=2)
REQUESTS: dict[str, dict[str, Any]] = {
    "prioritize": {"Pod": POD, "NodeNames": ["n1", "n2"], "Nodes": {"items": [node_object("n1", 8)]}},
    "preempt": {
        "Pod": POD,
        "NodeNameToVictims": {"n1": {"Pods": [pod_object("v")], "NumPDBViolations": 0}},
        "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "u"}], "NumPDBViolations": 0}},
    },
}


@pytest.mark.parametrize("verb", REQUESTS)
def test_every_field_of_a_schedulers_request_survives_its_edges(extender: str, verb: str) -> None:
    with httpx2.Client(base_url=extender) as client:
        for changed in mutations(REQUESTS[verb])[:: examples(6, 1)]:
            answer = client.post(f"/scheduler/{verb}", content=json.dumps(changed).encode())
            assert answer.status_code in (200, 400), (answer.status_code, answer.text[:300], changed)
            assert answer.status_code == 200 or answer.json()["Error"], "the reason"
