"""What the idle rule is told by the real accountant over HTTP: measured, unread, carried and unmetered time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accountant.core.settings import Limits, Settings
from accountant.wire.policy_models import IdleReclaimPolicy, Policy
from agent.wire import Batch
from fairshare.core.queues_and_weights import Pod
from fairshare.preemption.idle_reclaim import is_idle
from fairshare.preemption.preemption_types import Idleness, PodUse
from fairshare.usage.accountant_client import AccountantApi
from gputally.base.clock import VirtualClock
from tests.usage_records import QUARTER_MS, batch, interval, pod_holder, running_accountant

START_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
QUARTERS = 8
END_MS = START_MS + QUARTERS * QUARTER_MS
BUSY_US: dict[str, int | None] = {"idle": 0, "works": 800_000_000, "blind": None, "left": None, "short": 0}
METHODS = {"blind": "allocation", "left": "carried"}


def _batch(cluster: str, names: list[str]) -> Batch:
    """Every pod holds a GPU of its own for two hours; that of `short` was not metered in the first of them."""
    rows = [
        interval(
            START_MS + quarter * QUARTER_MS, f"GPU-{gpu}", pod_holder(name, uid=f"{cluster}-{name}"),
            busy_us=BUSY_US[name], method=METHODS.get(name, "device"),
        )
        for gpu, name in enumerate(names)
        for quarter in range(4 if name == "short" else 0, QUARTERS)
    ]  # fmt: skip
    return batch(rows, cluster=cluster, epoch=cluster)


@pytest.fixture(scope="module", params=[1, 2])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountantApi]:
    """Of one cluster, or of two that both have a pod called `idle`. Pages of three lines."""
    settings = Settings(data=tmp_path_factory.mktemp("data"), auth="off", limits=Limits(page_lines=3))
    batches = [_batch("c1", list(BUSY_US)), _batch("c2", ["idle"])][: request.param]
    with running_accountant(settings, VirtualClock(END_MS), *batches) as (service, url), AccountantApi(url) as ours:
        service.ledger.put_policy(Policy.model_validate({"queues": [{"name": "a"}]}), START_MS)
        ours.clusters = request.param  # type: ignore[attr-defined]
        yield ours


def test_only_who_was_measured_idle_is_idle(client: AccountantApi) -> None:
    rule = IdleReclaimPolicy.model_validate({"sustained": "2h", "grace": "30m"})
    spans = []
    for minutes in (120, 30):
        found = client.pod_usage(END_MS - minutes * 60_000, END_MS)
        spans.append({name: PodUse(a.busy, a.allocated_idle, a.allocated_unknown) for (_, name), a in found.items()})
    idleness = Idleness(END_MS, spans[0], spans[1])
    pods = [Pod(name, "ns", name, 1.0, "n", held=True, ready_ms=START_MS) for name in BUSY_US]
    alone = {"idle"} if client.clusters == 1 else set()  # type: ignore[attr-defined]
    assert {pod.name for pod in pods if is_idle(rule, pod, idleness)} == alone
    assert spans[0]["blind"] == spans[0]["left"] == PodUse(0, 0, 2 * 3_600_000_000)
    assert spans[0]["short"] == PodUse(0, 3_600_000_000, 0)


def test_some_pods_are_asked_for_by_name(client: AccountantApi) -> None:
    found = client.pod_usage(START_MS, END_MS, [("ns", "works"), ("ns", "gone"), ("other", "idle")])
    assert {key: held.busy for key, held in found.items()} == {("ns", "works"): QUARTERS * 800_000_000}
    many = [("ns", f"p{i}") for i in range(200)] + [("ns", "works")]
    assert client.pod_usage(START_MS, END_MS, many).keys() == {("ns", "works")}
