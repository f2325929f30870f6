"""The accountant that the pages' commands query: it has seven weeks of a small cluster.

Two nodes, eight GPUs and three teams, from 2026-10-01 to 20 November at 10:00 in virtual time. October's grace period
has ended, so the month can be closed. The data is made once and copied, so that one page can close a month without
effect on another."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.wire.policy_models import Budget, Policy, QueuePolicy
from agent.wire import PodFacts, UsageInterval
from fairshare.controller.control_loop import Controller
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, Object
from gputally.kubernetes.scheduler_plugins import schedulers
from gputally.server.https_server import serve
from gputally.testing.fake_scheduler import NAME, queue_object, setup_object
from tests.fairshare.scheduler_kinds import KINDS
from tests.fake_scheduler import installed
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

START_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
HOUR_MS = 3_600_000
NOW_MS = START_MS + (50 * 24 + 10) * HOUR_MS
CLUSTER = "prod"
PRICES = """\
schema: 1
currency: EUR
timezone: UTC
rows:
  - {id: h100, model: H100, price: "2.40", per: gpu-hour, valid_from: 2026-01-01, source: "contract 4711",
     as_of: 2026-01-01, basis: whole-instance}
  - {id: a100, model: A100, price: "1.10", per: gpu-hour, valid_from: 2026-01-01, source: "contract 4711",
     as_of: 2026-01-01, basis: whole-instance}
"""
MODELS = {"gpu-01": "NVIDIA H100 80GB HBM3", "gpu-07": "NVIDIA A100-SXM4-80GB"}
GPUS = 4


@dataclass(frozen=True)
class Job:
    """A pod that holds `gpus` GPUs of a node in the hours [since, until) of every day. busy: the busy share."""

    team: str
    name: str
    kind: str
    node: str
    gpus: tuple[int, ...]
    hours: tuple[int, int]
    busy_percent: int

    @property
    def uid(self) -> str:
        return f"{self.team}-{self.name}"


JOBS = (
    Job("vision", "train", "Job", "gpu-01", (0, 1), (0, 24), 85),
    Job("language", "tune", "PyTorchJob", "gpu-01", (2, 3), (6, 22), 60),
    Job("language", "notebook", "StatefulSet", "gpu-07", (0,), (8, 20), 5),
    Job("serving", "chat", "Deployment", "gpu-07", (1, 2), (0, 24), 30),
)
SHOWN = "kai" if "kai" in schedulers() else NAME
"""The scheduler of the pages; without it the fake one."""
POLICY = Policy(
    queues=tuple(
        QueuePolicy(name=name, team=name, deserved=quota, refs=(f"{SHOWN}:{name}",))
        for name, quota in (("vision", 2), ("language", 3), ("serving", 1))
    ),
    budgets=(Budget(name="language-hours", queue="language", limit=1_600, thresholds=(0.5, 0.8, 1.0)),),
)


def _rows(node: str, hours: int) -> Iterator[UsageInterval]:
    of = {gpu: job for job in JOBS if job.node == node for gpu in job.gpus}
    shape: dict[str, Any] = {"span_ms": HOUR_MS, "gpu_model": MODELS[node], "energy_uj": 900_000_000_000}
    for hour in range(hours):
        for gpu in range(GPUS):
            job = of.get(gpu)
            start, name = START_MS + hour * HOUR_MS, f"GPU-{node}-{gpu}"
            if job is not None and job.hours[0] <= hour % 24 < job.hours[1]:
                holder = pod_holder(f"{job.name}-0", job.team, job.uid)
                yield interval(start, name, holder, busy_us=HOUR_MS * 10 * job.busy_percent, **shape)
            else:
                yield interval(start, name, **shape)


def _facts(node: str) -> Iterator[PodFacts]:
    for job in JOBS:
        if job.node == node:
            yield pod_facts(
                f"{job.name}-0", START_MS, namespace=job.team, node=node, uid=job.uid, queue_ref=f"{SHOWN}:{job.team}",
                workload=f"{job.kind}/{job.name}", created_ms=START_MS - 60_000, scheduled_ms=START_MS - 30_000,
                started_ms=START_MS,
            )  # fmt: skip


def objects() -> list[Object]:
    """Return the cluster's objects at the end: the pods of every queue request more GPUs than it holds. Without the
    scheduler of the pages, the queues are those of the fake one."""
    queues: list[Object] = [
        {
            "apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": queue.name},
            "spec": {"resources": {"gpu": {"quota": queue.deserved, "limit": -1, "overQuotaWeight": 1}}},
            "status": {"requested": {GPU: "6"}, "allocated": {GPU: "2"}},
        }
        for queue in POLICY.queues
    ]  # fmt: skip
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {GPU: str(GPUS)}}
    nodes: list[Object] = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": ready} for name in MODELS
    ]
    shard: Object = {"apiVersion": "kai.scheduler/v1", "kind": "SchedulingShard", "metadata": {"name": "default"}}
    shard["spec"] = {"kValue": 0}
    if SHOWN == NAME:
        return [
            *(queue_object(queue.name, requested=6, allocated=2) for queue in POLICY.queues),
            *nodes,
            setup_object(),
        ]
    return [*queues, *nodes, shard]


def make(folder: Path) -> None:
    """Write the ledger, the price book and the policy to the folder."""
    (folder / "prices.yaml").write_text(PRICES, "utf-8")
    clock = VirtualClock(START_MS)
    with Service(_settings(folder), clock) as service:
        service.ledger.put_policy(POLICY, START_MS)
        clock.advance(NOW_MS - START_MS)
        for node in MODELS:
            rows = _rows(node, (NOW_MS - START_MS) // HOUR_MS)
            one = batch(rows, _facts(node), cluster=CLUSTER, node=node, epoch=f"epoch-{node}")
            deliver(service.ledger, clock.wall_ms(), one)
        some_scheduler = installed(folder / "packages") if SHOWN == NAME else nullcontext()
        with some_scheduler, serve(service.app, "127.0.0.1", 0) as url, AccountantApi(url) as client:
            Controller(POLICY, client, MemoryCluster(KINDS, objects()), clock).cycle()


def _settings(folder: Path) -> Settings:
    return Settings(
        data=folder, auth="off", listen="127.0.0.1:0", prices=folder / "prices.yaml", exported_labels=("project",)
    )


@contextmanager
def answering(made: Path, folder: Path) -> Iterator[str]:
    """Copy the data to `folder` and serve it until the block ends. Yields the address."""
    shutil.copytree(made, folder, dirs_exist_ok=True)
    with Service(_settings(folder), VirtualClock(NOW_MS)) as service, serve(service.app, "127.0.0.1", 0) as address:
        yield address


INSTANCES = "schema: 1\ninstances: [{name: p5.48xlarge, model: H100}, {name: p4d.24xlarge, model: A100}]\n"
INVOICE = """\
BilledCost,BillingCurrency,ChargePeriodStart,ChargePeriodEnd,RegionId,PricingCategory,SkuId,SkuPriceDetails,ServiceName
7000.00,EUR,2026-10-01T00:00:00Z,2026-10-02T00:00:00Z,,,s1,"{""InstanceType"":""p5.48xlarge""}",EC2
3300.00,EUR,2026-10-01T00:00:00Z,2026-10-02T00:00:00Z,,,s2,"{""InstanceType"":""p4d.24xlarge""}",EC2
12.50,EUR,2026-10-03T00:00:00Z,2026-10-04T00:00:00Z,,,egress,,EC2
"""
SACCT = """\
JobIDRaw|JobID|JobName|User|Account|Partition|Submit|Start|End
4711|4711|train|ada|vision|gpu|1790812800|1790812860|1790816460
"""
TRACE = "job_id,submit_offset_s,team,gpus,duration_s\n" + "".join(
    f"{team}-{number},{number * 5_400},{team},{gpus},{hours * 3_600}\n"
    for team, gpus, hours in (("vision", 4, 9), ("language", 2, 12), ("serving", 1, 6))
    for number in range(60)
)


def _policy(policy: Policy) -> str:
    return yaml.safe_dump(policy.model_dump(mode="json", by_alias=True, exclude_defaults=True))


def stage(folder: Path) -> None:
    """Write the files that the pages name and expect the reader to have."""
    files = {
        "admin.token": "admin", "reader.token": "reader", "me.token": "reader",
        "new.yaml": PRICES.replace("2.40", "2.10"),
        "prices.yaml": PRICES, "instances.yaml": INSTANCES, "focus.csv": INVOICE, "jobs.txt": SACCT, "jobs.csv": TRACE,
        "policy.yaml": _policy(POLICY), "next.yaml": _policy(POLICY.model_copy(update={"k": 0.5})),
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
