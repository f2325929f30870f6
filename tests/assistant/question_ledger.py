"""A small ledger of two teams about which the questions are asked, with figures that can be computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import ASGIApp

from accountant.composition import Service
from accountant.ledger.protocols import Down, Facts, NamespaceFacts, NodeFacts
from accountant.wire.policy_models import Policy
from agent.wire import AgentReport, GpuError, GpuReport, PodFacts, UsageInterval
from fairshare.controller.control_loop import Controller
from fairshare.controller.policy_file import PolicyLocation
from fairshare.targets.installed import kinds
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web.page_authentication import PageAuthentication
from fairshare.web.page_routing import PageContext, PagesApp
from fairshare.web.policy_pages import ROUTES
from fairshare.web.queue_history import QueueHistory, ReportCache
from fairshare.web.what_if_worker import Previews
from gputally.base.clock import VirtualClock
from gputally.base.pod_stop import PodStop
from gputally.base.version import __version__
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.server.https_server import serve
from gputally.server.one_address import OneAddress
from gputally.server.tokens_and_grants import TokenFile
from tests.http.conftest import INVENTORY, bearer, decision, settings_in, token_entry
from tests.price_books import price_book_text
from tests.usage_records import QUARTER_MS, batch, deliver, interval, pod_facts, pod_holder

USER = "gputally.dev/user"
PROJECT_OF = {"vision": "detector", "nlp": "chat"}
CENTRE_OF = {"vision": "4100", "nlp": "4200"}
POLICY = {
    "schema": 1,
    "queues": [
        {"name": "vision", "team": "vision", "deserved": 2, "refs": ["kai:vision"]},
        {"name": "nlp", "team": "nlp", "deserved": 0.5, "refs": ["kai:nlp"]},
    ],
    "targets": {"kai": {"mode": "weight"}},
    "max_staleness": "31d",
    "min_coverage": 0.01,
    "budgets": [{"name": "nlp-month", "team": "nlp", "limit": "500", "currency": "USD"}],
}

CLUSTER = [
    {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
     "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": gpus}}}
    for name, gpus in (("n1", "2"), ("n2", "1"))
] + [
    {"apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": name},
     "spec": {"resources": {"gpu": {"quota": quota, "limit": -1, "overQuotaWeight": 1}}},
     "status": {"requested": {"nvidia.com/gpu": asked}, "allocated": {"nvidia.com/gpu": "1"}}}
    for name, quota, asked in (("vision", 2, "1"), ("nlp", 0.5, "2"))
]  # fmt: skip
"""What the scheduler has at noon of 16 November: Job/live of vision and Notebook/explore of nlp hold a GPU each."""


def at(text: str) -> int:
    """Milliseconds of `2026-11-10 10:00`, in UTC."""
    return round(datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=UTC).timestamp()) * 1000


NOW_MS = at("2026-11-16 12:00")
OFF_THE_BUS = GpuError("xid 79", 3, at("2026-11-10 08:00"), at("2026-11-16 09:30"))
AGENT = AgentReport(version=__version__, gpus=(GpuReport("GPU-1"), GpuReport("GPU-2", (OFF_THE_BUS,))))
OLD_AGENT = AgentReport(version="0.0.9")
"""GPU-2 had three XID errors, and nobody knows of the GPU of node n2."""


def hours(
    first: str, count: int, gpu: str, pod: str = "", space: str = "", busy_permille: int = 0
) -> list[UsageInterval]:
    """The quarters of hours in which a pod, or nobody, held a GPU."""
    holder = pod_holder(pod, space, pod) if pod else None
    busy_us = QUARTER_MS * busy_permille if pod else 0
    return [interval(at(first) + n * QUARTER_MS, gpu, holder, busy_us=busy_us) for n in range(4 * count)]


def fact(
    pod: str, space: str, workload: str, user: str, created: str, began: str = "", ended: str = "",
    stop: PodStop | None = None,
) -> PodFacts:  # fmt: skip
    """A pod's facts; without `began` it waits."""
    times = {"scheduled_ms": at(began), "started_ms": at(began)} if began else {}
    return pod_facts(
        pod, at(ended or began or created), namespace=space, node="n1", uid=pod, workload=workload,
        labels={USER: user, "project": PROJECT_OF[space], "cost-centre": CENTRE_OF[space]},
        created_ms=at(created), queue_ref=f"policy:{space}", ended_ms=at(ended) if ended else None,
        requests={"nvidia.com/gpu": "1"}, stop=stop, **times,
    )  # fmt: skip


TAKEN = PodStop(
    "preempted", "kai-scheduler", "PreemptionByScheduler", "preempted by higher priority workload ops/demo",
    at("2026-11-10 18:00"),
)  # fmt: skip
FACTS = (
    fact("old", "vision", "Job/old", "ada", "2026-10-20 10:00", "2026-10-20 10:00", "2026-10-20 20:00"),
    fact("eval", "nlp", "Job/eval", "bo", "2026-10-20 10:00", "2026-10-20 10:00", "2026-10-20 14:00"),
    fact("waste", "vision", "Job/waste", "ada", "2026-11-10 09:30", "2026-11-10 10:00", "2026-11-10 16:00"),
    fact("tune", "nlp", "Job/tune", "bo", "2026-11-10 10:00", "2026-11-10 10:00", "2026-11-10 18:00", TAKEN),
    fact("worker-0", "vision", "Job/train", "cy", "2026-11-12 10:00", "2026-11-12 10:00", "2026-11-12 12:00"),
    fact("next", "nlp", "Job/next", "bo", "2026-11-12 11:00", "2026-11-12 12:00", "2026-11-12 14:00"),
    fact("again", "vision", "Job/train", "cy", "2026-11-12 12:00", "2026-11-12 15:00", "2026-11-12 16:00"),
    fact("explore", "nlp", "Notebook/explore", "dee", "2026-11-15 08:00", "2026-11-15 08:00"),
    fact("live", "vision", "Job/live", "ada", "2026-11-16 09:00", "2026-11-16 09:00"),
    fact("later", "nlp", "Job/later", "bo", "2026-11-16 10:00"),
)
"""Job vision/train was preempted at noon, when its pod was worker-0, and ran again at three; Job nlp/later waits since
ten today."""
ROWS = (
    *hours("2026-10-20 10:00", 10, "GPU-1", "old", "vision", 750),
    *hours("2026-10-20 10:00", 4, "GPU-2", "eval", "nlp", 1000),
    *hours("2026-11-10 10:00", 6, "GPU-1", "waste", "vision", 0),
    *hours("2026-11-10 10:00", 8, "GPU-2", "tune", "nlp", 1000),
    *hours("2026-11-12 10:00", 2, "GPU-1", "worker-0", "vision", 500),
    *hours("2026-11-12 12:00", 2, "GPU-1", "next", "nlp", 1000),
    *hours("2026-11-12 15:00", 1, "GPU-1", "again", "vision", 500),
    *hours("2026-11-15 08:00", 28, "GPU-2", "explore", "nlp", 0),
    *hours("2026-11-16 09:00", 3, "GPU-1", "live", "vision", 500),
)
"""October: vision 10 GPU-hours, nlp 4. November: vision 6 + 2 + 1 + 3 = 12, nlp 8 + 2 + 28 = 38. One costs 6 USD."""


@dataclass(frozen=True)
class Accountant:
    """A running accountant. admin and lead: files with the tokens of an admin and of team nlp's lead."""

    url: str
    admin: Path
    lead: Path


@contextmanager
def running(folder: Path) -> Iterator[Accountant]:
    """Serve the ledger. October is closed and published, with an invoice of 100 USD; a record
    of an hour of it came later. A draft of November was kept at eleven today, before the records of today came, which
    are late for it as far as they are of before eleven. Node n2 was down for three hours of
    11 November, and has been silent since; its agent is of an earlier release."""
    chosen = settings_in(
        folder, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY,
        exported_labels=("project", "cost-centre"), controller_pages="/",
        tokens="tokens:\n" + token_entry("all", "admin, policy, read") + token_entry("lead", "read", ", teams: [nlp]"),
    )  # fmt: skip
    tokens = {}
    for name in ("all", "lead"):
        tokens[name] = folder / f"{name}.token"
        tokens[name].write_text(name + "\n")
    rows = sorted(ROWS, key=lambda row: row.start_ms)
    before, since = ([row for row in rows if (row.start_ms < at("2026-11-16 00:00")) is old] for old in (True, False))
    late = hours("2026-10-21 10:00", 1, "GPU-1", "old", "vision", 1000)
    clock = VirtualClock(NOW_MS - chosen.correct_seconds * 1000)
    reports = ReportCache()
    with (
        Service(chosen, clock) as service,
        serve(OneAddress(service.app, _controller_pages(folder, reports, clock)), "127.0.0.1", 0) as url,
    ):
        ask = httpx2.Client(base_url=url, headers=bearer("all"), timeout=60)
        with ask:
            _done(ask.put("/v1/policy", json=POLICY))
            deliver(
                service.ledger, clock.wall_ms(), batch(before, FACTS, cluster="prod", node="n1"),
                batch(hours("2026-11-11 09:00", 1, "GPU-3"), cluster="prod", node="n2", agent=OLD_AGENT),
            )  # fmt: skip
            down = Down(at("2026-11-11 10:00"), at("2026-11-11 13:00"), "kernel panic")
            spaces = tuple(NamespaceFacts("prod", team, team) for team in ("nlp", "vision"))
            nodes = (NodeFacts("prod", "n2", down=(down,)),)
            service.ledger.observe(Facts(nodes=nodes, namespaces=spaces), clock.wall_ms())
            _done(ask.post("/v1/decisions", json=DECISIONS))
            line = {"item": "gpu-node", "gpu_model": "NVIDIA H100 80GB HBM3", "amount": "100.00", "currency": "USD"}
            invoice = {"source": "cloud-2026-10.csv", "lines": [line]}
            _done(ask.post("/v1/reconciliation/2026-10", params={"keep": "true"}, json=invoice))
            month = _done(ask.get("/v1/periods/2026-10"))
            accepted = [objection["kind"] for objection in month["objections"]]
            _done(ask.post("/v1/periods/2026-10/close", json={"acknowledge": accepted, "reason": "a new cluster"}))
            _done(ask.post("/v1/periods/2026-10/publish", json={"reason": "agreed"}))
            _done(ask.post("/v1/periods/2026-11/drafts", json={"reason": "sent to the teams"}))
            clock.advance_to(NOW_MS)
            deliver(
                service.ledger,
                NOW_MS,
                batch([*late, *since], cluster="prod", node="n1", epoch="late", agent=AGENT),
            )
            service.maintain()
        with AccountantApi(url, token_file=tokens["all"], clock=clock) as client:
            policy = Policy.model_validate(POLICY)
            cluster = MemoryCluster(kinds(), CLUSTER)
            Controller(
                policy, client, cluster, clock, observe=lambda one: reports.observe(one, policy), silent=True
            ).cycle()
        yield Accountant(url, tokens["all"], tokens["lead"])


def _controller_pages(folder: Path, reports: ReportCache, clock: VirtualClock) -> ASGIApp:
    file = folder / "policy-file.yaml"
    file.write_text(json.dumps(POLICY))
    tokens = TokenFile(folder / "tokens.yaml", clock, lambda fault: None)
    unasked = AccountantApi("http://127.0.0.1:9")  # the pages of these questions are made from the last cycle alone
    previews = Previews(lambda *_: pytest.fail("no preview"))
    context = PageContext(reports, QueueHistory(unasked, clock), previews, PolicyLocation(file), clock, accountant="/")
    return PagesApp(context, PageAuthentication(tokens), ROUTES).observed()


DECISIONS = [
    decision(id="p", at_ms=at("2026-11-12 11:59"), kind="preemption", subject="Job/vision/train", mode="enforce",
             reason="team nlp is owed 1 GPU",
             inputs={"pods": ["vision/worker-0"], "result": "stopped", "lost_gpu_hours": 0.5}),
    decision(id="w", at_ms=NOW_MS - 60_000, kind="weight", subject="vision", value=2.0, mode="enforce",
             reason="used less than its share"),
]  # fmt: skip


def _done(answer: httpx2.Response) -> Any:
    assert answer.is_success, answer.text
    return answer.json()
