"""October 2026 of a cluster with three GPUs, which all other figures of these tests are computed from by hand.

The cluster is in Berlin, and everything happens on 25 October, when the clocks go back: from 00:00Z to 08:00Z, which
are the local hours 02, 02 again, 03, 04, 05, 06, 07 and 08. Every cell is one GPU-hour:

    local hour    02     02'    03     04     05     06     07     08
    A (n1, H100)  train0 train0 train0 free   lost   -      -      -
    B (n1, H100)  train1 train1 train1 train1 eval   free   free   free
    C (n2, A100)  serve0 serve0 serve0 serve0 serve1 serve1 serve1 serve1

train0 is busy for two hours; what it did in its third is unknown. train1 is busy half of the time, eval all of the
time, and serve0 and serve1 never. Nobody reports A in its last three hours, and node n1 is down during 07. Nothing is
capacity before 02 or after 08: the nodes are gone at 08:00Z.

    GPU-hours     A    B    C    sum
    busy          2    2+1       5     vision 4, nlp 1
    idle               2    8    10    vision 2, nlp 8
    unknown       1              1     vision
    unallocated   1    2         3
    down          1+1  1         3     the lost hour of A, and 07
    unmetered     2              2     06 and 08 of A
                  8    8    8    24

An hour costs 2.05 on an H100 and 0.333333333333 on an A100:

    vision        7 x 2.05                        14.35
    nlp           1 x 2.05 + 8 x 0.333333333333    4.716666666664   payable 4.72
    idle          3 x 2.05                         6.15
                                                  25.216666666664   payable 25.22
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.wire import PodFacts
from gputally.base.clock import VirtualClock
from tests.seams.site import A100, HOUR_MS, Site, book, hours_of, site, uid_of
from tests.usage_records import pod_facts

BEGIN_MS = 1_792_886_400_000  # 2026-10-25T00:00:00Z
NOVEMBER_MS = BEGIN_MS + 8 * 24 * HOUR_MS
"""When the month is over: 2026-11-02T00:00:00Z."""
ZONE = "Europe/Berlin"
INVENTORY = """\
schema: 1
cluster: prod
nodes:
  - name: n1
    pool: train
    region: eu-1
    zone: eu-1a
    capacity_type: on-demand
    instance_type: big
    down: [{start: 2026-10-25T06:00:00Z, end: 2026-10-25T07:00:00Z, reason: firmware}]
    deleted: 2026-10-25T08:00:00Z
  - {name: n2, pool: serve, region: eu-2, zone: eu-2b, capacity_type: spot, deleted: 2026-10-25T08:00:00Z}
namespaces:
  - {name: vision, team: vision}
  - {name: nlp, team: nlp}
"""
PRICES = book(
    "id: h100, model: H100, price: 2.05", "id: a100, model: A100, price: '0.333333333333'", timezone="Europe/Berlin"
)


def at(hour: float) -> int:
    """Return an instant of the day by its hour in UTC."""
    return BEGIN_MS + round(hour * HOUR_MS)


def running(pod: str, since_ms: int, workload: str, **fields: Any) -> PodFacts:
    """Build facts of a pod that ran as soon as it was created. pod: `namespace/name`."""
    namespace, _, name = pod.partition("/")
    instants = dict.fromkeys(("created_ms", "scheduled_ms", "started_ms", "observed_ms"), since_ms)
    return pod_facts(
        name, namespace=namespace, uid=uid_of(pod), workload=workload, **{**instants, **fields}
    )  # fmt: skip


def report_train(of: Site) -> None:
    """Report node n1."""
    of.send(
        [
            *hours_of("A", at(0), 2, "vision/train0", 1),
            *hours_of("A", at(2), 1, "vision/train0", None),
            *hours_of("A", at(3), 1),
            *hours_of("A", at(4), 1, health="lost"),
            *hours_of("B", at(0), 4, "vision/train1", 0.5),
            *hours_of("B", at(4), 1, "nlp/eval", 1),
            *hours_of("B", at(5), 3),
        ],
        [
            running("vision/train0", at(0), "Job/train", labels={"gputally.dev/user": "ann"}),
            running("vision/train1", at(0), "Job/train", labels={"gputally.dev/user": "ann"}),
            running("nlp/eval", at(4), "Job/eval"),
        ],
    )


def report_serve(of: Site) -> None:
    """Report node n2."""
    of.send(
        [
            *hours_of("C", at(0), 4, "nlp/serve0", 0, gpu_model=A100),
            *hours_of("C", at(4), 4, "nlp/serve1", 0, gpu_model=A100),
        ],
        [
            running("nlp/serve0", at(0), "Deployment/serve", node="n2"),
            running("nlp/serve1", at(4), "Deployment/serve", node="n2"),
        ],
        node="n2",
    )


@contextmanager
def october(folder: Path, now_ms: int = NOVEMBER_MS, **settings: Any) -> Iterator[Site]:
    """Run an accountant that has the month. Settings replace those of the month."""
    given = {"timezone": ZONE, "prices": PRICES, "inventory": INVENTORY, **settings}
    with site(folder, VirtualClock(now_ms), **given) as found:
        report_train(found)
        report_serve(found)
        yield found
