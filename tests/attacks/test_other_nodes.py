"""Attacks with one node's token on another node's data, against a running accountant: no figure changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest

from agent.wire import Batch, Holder, PodFacts, Sharing, Slice, UsageInterval
from tests.attacks.conftest import Running

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
MINUTE_MS = 60_000
SPAN_MS = 40 * 24 * 60 * MINUTE_MS
"""The span of the queries, which contains everything reported here."""
OLDEST = "00000000-0000-7000-8000-000000000000"
"""Sorts before every honest epoch."""
OWNER, ATTACKER = "node-2", "node-1"
POD = Holder(kind="pod", uid="11111111-0000-4000-8000-000000000002", namespace="vision", name="train-0")
CLAIM = Holder(kind="pod", uid="11111111-0000-4000-8000-000000000003", namespace="vision", name="claimed-0")
JOB = Holder(kind="slurm", uid="4711", name="job 4711")
PROCESS = Holder(kind="process", uid="node-2/812/77", name="python")
MIG = Slice(profile="1g.10gb", gi=7, ci=0, compute=1, compute_of=7, memory_mib=9728, memory_of_mib=81559)
NUMBERS = itertools.count(1)
"""Numbers of the attacker's records."""


def row(seq: int, gpu: str, start_ms: int, **given: Any) -> UsageInterval:
    return UsageInterval(
        **{
            "seq": seq, "start_ms": start_ms, "end_ms": start_ms + MINUTE_MS, "gpu_uuid": gpu,
            "gpu_model": "NVIDIA H100 80GB HBM3", "holder": POD, "capacity_us": MINUTE_MS * 1000,
            "allocated_us": MINUTE_MS * 1000, "busy_us": MINUTE_MS * 500, "method": "device",
        }
        | given
    )  # fmt: skip


class Caller:
    """Sends requests to the accountant, with a given token each."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client
        self._end_ms = int(time.time() * 1000) // MINUTE_MS * MINUTE_MS

    def ask(self, path: str) -> Any:
        answer = self._client.get(path, headers={"Authorization": "Bearer admin"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def act(self, path: str, content: Any) -> None:
        answer = self._client.post(path, json=content, headers={"Authorization": "Bearer admin"})
        assert answer.status_code == 200, answer.text

    def send(self, token: str, path: str = "/v1/usage", *, node: str = "", **given: Any) -> httpx2.Response:
        records = [*given.get("intervals", ()), *given.get("facts", ())]
        first = min(record.seq for record in records)
        batch = Batch(
            **{
                "cluster": "prod", "node": node or token, "boot_id": "boot", "first_seq": first, "oldest_seq": first,
                "epoch": "01930000-0000-7000-8000-000000000001",
            }
            | given
        )  # fmt: skip
        headers = {"Authorization": f"Bearer {token}"}
        return self._client.post(path, content=msgspec.json.encode(batch), headers=headers)

    def quarantined(self) -> list[tuple[str, str]]:
        return [(one["node"], one["reason"]) for one in self.ask("/v1/quarantine?limit=1000")]

    def books(self) -> Any:
        """Return the owner's figures."""
        span = (
            f"start={self._end_ms - SPAN_MS}&end={self._end_ms}&by=team,namespace,pod,gpu,mig_profile&where.node=node-2"
        )
        return [self.ask(f"/v1/{what}?{span}")["lines"] for what in ("usage", "cost")]


@pytest.fixture(scope="module")
def begin_ms() -> int:
    return (int(time.time() * 1000) // MINUTE_MS - 30) * MINUTE_MS


@pytest.fixture(scope="module")
def caller(running: Running, begin_ms: int) -> Iterator[Caller]:
    """An accountant to which the owner has reported a minute of everything that can hold a GPU."""
    with httpx2.Client(base_url=running.url, timeout=30) as client:
        yield _prepared(Caller(client), begin_ms)


def _prepared(found: Caller, begin_ms: int) -> Caller:
    job = PodFacts(seq=0, uid=JOB.uid, namespace="", name=JOB.name, node="node-[2-3]", observed_ms=begin_ms)
    found.act("/v1/pods", msgspec.to_builtins({"cluster": "prod", "source": "slurm", "pods": [job]}))
    rows = (
        row(1, "GPU-whole", begin_ms),
        row(2, "GPU-mig", begin_ms, slice=MIG, method="device"),
        row(3, "GPU-claim", begin_ms, holder=CLAIM, sharing=Sharing("dra", 2)),
        row(4, "GPU-slurm", begin_ms, holder=JOB),
        row(5, "GPU-process", begin_ms, holder=PROCESS),
    )
    told = tuple(
        PodFacts(seq=6 + number, uid=pod.uid, namespace="vision", name=pod.name, node=OWNER, observed_ms=begin_ms)
        for number, pod in enumerate((POD, CLAIM))
    )
    answer = found.send(OWNER, intervals=rows, facts=told)
    assert answer.status_code == 200, answer.text
    assert found.quarantined() == []
    return found


@pytest.mark.parametrize("gpu", ["whole", "mig", "claim", "slurm", "process"])
@pytest.mark.parametrize("when", ["the same minute", "an earlier minute", "a later minute", "last month"])
def test_rows_of_another_nodes_gpu_are_set_aside(caller: Caller, begin_ms: int, gpu: str, when: str) -> None:
    shift = {"the same minute": 0, "an earlier minute": -10, "a later minute": 5, "last month": -31 * 24 * 60}[when]
    before, already = caller.books(), len(caller.quarantined())
    slice_ = {"slice": MIG, "method": "device"} if gpu == "mig" else {}
    forged = Holder(kind="pod", uid="22222222-0000-4000-8000-000000000001", namespace="other", name="forged")
    attack = row(next(NUMBERS), f"GPU-{gpu}", begin_ms + shift * MINUTE_MS, holder=forged, **slice_)
    answer = caller.send(ATTACKER, epoch=OLDEST, intervals=(attack,))
    assert answer.status_code == 200, answer.text
    assert caller.books() == before
    refused = caller.quarantined()
    assert len(refused) == already + 1
    assert set(refused) == {(ATTACKER, "foreign-gpu")} or (ATTACKER, "foreign-gpu") in refused


@pytest.mark.parametrize("pod", [POD, CLAIM], ids=["pod", "pod with a ResourceClaim"])
def test_facts_about_another_nodes_pod_re_attribute_nothing(caller: Caller, begin_ms: int, pod: Holder) -> None:
    before = caller.books()
    for observed in (begin_ms - MINUTE_MS, begin_ms + MINUTE_MS):
        fact = PodFacts(
            seq=next(NUMBERS), uid=pod.uid, namespace="other", name=pod.name, node=OWNER, queue_ref="kai:other",
            observed_ms=observed, created_ms=1, scheduled_ms=1, labels={"team": "other"},
        )  # fmt: skip
        assert caller.send(ATTACKER, epoch=OLDEST, facts=(fact,)).status_code == 200
    assert caller.books() == before
    assert (ATTACKER, "foreign-pod") in caller.quarantined()


@pytest.mark.parametrize("holder", [POD, CLAIM, JOB, PROCESS], ids=["pod", "claim", "slurm step", "process"])
def test_naming_another_nodes_holder_on_its_own_gpu_changes_nothing(
    caller: Caller, begin_ms: int, holder: Holder
) -> None:
    before = caller.books()
    answer = caller.send(ATTACKER, epoch=OLDEST, intervals=(row(next(NUMBERS), "GPU-own", begin_ms, holder=holder),))
    assert answer.status_code == 200, answer.text
    assert caller.books() == before


def test_imported_rows_and_another_nodes_name_need_another_token(caller: Caller, begin_ms: int) -> None:
    before = caller.books()
    attack = (row(next(NUMBERS), "GPU-whole", begin_ms, method="imported"),)
    epoch = "import:slurm:00000000000000"
    assert caller.send(ATTACKER, "/v1/imports/usage", epoch=epoch, intervals=attack).status_code == 403
    assert caller.send(ATTACKER, epoch=epoch, intervals=attack).status_code == 422
    assert caller.send(ATTACKER, node=OWNER, epoch=OLDEST, intervals=attack).status_code == 403
    assert caller.send("importer", "/v1/imports/usage", node=ATTACKER, epoch=epoch, intervals=attack).status_code == 200
    assert caller.books() == before
    assert (ATTACKER, "foreign-gpu") in caller.quarantined()
