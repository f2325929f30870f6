"""The client against the real accountant over HTTP: types, totals, paging and errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from importlib.resources import as_file, files
from pathlib import Path

import pandas as pd
import pytest

import gputally
from accountant.core.settings import Settings
from accountant.wire.policy_models import Decision, Policy, QueuePolicy
from agent.wire import Batch
from gputally.base.accountant_connection import Unanswered
from gputally.base.clock import VirtualClock
from gputally.client import Client
from tests.usage_records import QUARTER_MS, batch, interval, pod_facts, pod_holder, running_accountant

START_MS = 1_790_812_800_000  # 2026-10-01T00:00Z
HOUR_MS = 3_600_000
PODS = 3
ACCOUNTS = [
    f"{name}_gpu_us" for name in ("busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down")
]


def _batch() -> Batch:
    """Build four quarter-hours of four GPUs: three held by a pod each, one unheld."""
    facts = [pod_facts(f"pod-{i}", START_MS, namespace=f"ns{i}", queue_ref="kai:a") for i in range(PODS)]
    holders = [*(pod_holder(f"pod-{i}", f"ns{i}") for i in range(PODS)), None]
    rows = [
        interval(START_MS + quarter * QUARTER_MS, f"GPU-{gpu}", holder, busy_us=450_000_000 if holder else 0)
        for quarter in range(4)
        for gpu, holder in enumerate(holders)
    ]
    return batch(rows, facts)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    clock = VirtualClock(START_MS + HOUR_MS)
    policy = Policy(queues=(QueuePolicy(name="a", team="vision", refs=("kai:a",)),))
    decision = Decision(
        id="d1", at_ms=START_MS + 1, kind="weight", target="kai", subject="a", mode="dry-run",
        value=1.5, previous=1.0, reason="below its share", policy_version=policy.version(),
    )  # fmt: skip
    with as_file(files("gputally.demo") / "data" / "price-book.yaml") as prices:
        settings = Settings(data=tmp_path_factory.mktemp("data"), auth="off", prices=Path(prices))
        with running_accountant(settings, clock, _batch()) as (service, url):
            service.ledger.put_policy(policy, START_MS)
            service.ledger.record_decisions([decision], clock.wall_ms())
            yield gputally.connect(url)


def test_usage_adds_up_and_is_typed(client: Client) -> None:
    frame = client.usage(START_MS, START_MS + HOUR_MS, by=["team", "pod"])
    assert list(frame.columns[:2]) == ["team", "pod"]
    assert int(frame[ACCOUNTS].sum().sum()) == 4 * 3_600_000_000
    held = frame[frame.team == "vision"]
    assert list(held.busy_gpu_us) == [1_800_000_000] * PODS
    assert {str(frame[column].dtype) for column in ACCOUNTS} == {"int64"}
    assert frame.attrs["coverage"] == 1.0


def test_pages_are_hidden(client: Client) -> None:
    whole = client.usage(START_MS, START_MS + HOUR_MS, by=["pod"])
    query = {"start": str(START_MS), "end": str(START_MS + HOUR_MS), "by": ["pod"], "limit": "1"}
    pages = client._pages("/v1/usage", query)
    assert [len(page["lines"]) for page in pages] == [1] * len(whole)
    assert [line["key"]["pod"] for page in pages for line in page["lines"]] == list(whole.pod)


def test_filters_and_aware_instants(client: Client) -> None:
    begin = pd.Timestamp(START_MS, unit="ms", tz="UTC")
    frame = client.usage(begin, begin + pd.Timedelta(hours=1), by=["namespace"], where={"namespace": ["ns0", "ns2"]})
    assert list(frame.namespace) == ["ns0", "ns2"]
    with pytest.raises(ValueError, match="has no time zone"):
        client.usage(begin.tz_localize(None), by=["team"])


def test_instants_are_told_as_notebooks_have_them(client: Client) -> None:
    hour = client.cost(START_MS, START_MS + HOUR_MS)
    frame = pd.DataFrame({"at": [START_MS, START_MS + HOUR_MS]})
    pd.testing.assert_frame_equal(client.cost(frame["at"].iloc[0], frame["at"].iloc[1]), hour)
    day = client.cost(date(2026, 10, 1), date(2026, 10, 2))
    pd.testing.assert_frame_equal(client.cost("2026-10-01", "2026-10-02"), day)
    assert day.gpu_us.sum() == hour.gpu_us.sum() > 0


def test_cost_is_exact_money(client: Client) -> None:
    frame = client.cost(START_MS, START_MS + HOUR_MS, by=["team"])
    assert all(isinstance(cost, Decimal) for cost in frame.cost)
    assert sum(frame.cost) == frame.attrs["total"]
    assert set(frame.currency) == {"USD"}
    assert list(frame.unpriced_gpu_us) == [0] * len(frame)


def test_a_statement_is_its_lines_and_what_is_due(client: Client) -> None:
    frame = client.statement("2026-10")
    assert list(frame.columns[:4]) == ["month", "team", "account", "detail"]
    assert int(frame.gpu_us.sum()) == 4 * 3_600_000_000
    assert sum(cost for cost in frame.cost if cost is not None) == frame.attrs["cost"]
    assert sum(frame.attrs["due"].values()) == frame.attrs["due_total"]
    assert "__idle__" not in frame.attrs["due"]
    assert frame.attrs["due_total"] + (frame.attrs["not_billed"] or 0) == round(frame.attrs["cost"], 2)
    assert (frame.attrs["status"], frame.attrs["currency"]) == ("open", "USD")
    assert len(frame.attrs["hash"]) == 64
    ours = client.statement("2026-10", team="vision")
    assert set(ours.team) == {"vision"}
    assert ours.attrs["due"] == {"vision": frame.attrs["due"]["vision"]}
    with pytest.raises(Unanswered, match="has not begun"):
        client.statement("2026-12")


def test_a_window_gives_shares_of_the_capacity(client: Client) -> None:
    frame = client.window("1h", at=START_MS + HOUR_MS)
    assert list(frame.queue) == ["a"]
    assert list(frame.share) == [0.75]
    assert (frame.attrs["unit"], frame.attrs["capacity"]) == ("gpu_us", 4 * 3_600_000_000)
    assert frame.attrs["watermark"] == pd.Timestamp(START_MS + HOUR_MS, unit="ms", tz="UTC")
    assert client.window("1h", at=START_MS + HOUR_MS, cluster="c").equals(frame)
    assert client.window("1h", at=START_MS + HOUR_MS, cluster="another").attrs["capacity"] == 0


def test_decisions_have_utc_instants(client: Client) -> None:
    frame = client.decisions(START_MS, START_MS + HOUR_MS)
    assert list(frame["at"]) == [pd.Timestamp(START_MS + 1, unit="ms", tz="UTC")]
    assert list(frame.value) == [1.5]
    empty = client.decisions(START_MS + HOUR_MS // 2, START_MS + HOUR_MS)
    assert list(empty.columns) == list(frame.columns)
    assert len(empty) == 0


def test_what_goes_wrong_is_one_line(client: Client) -> None:
    with pytest.raises(Unanswered, match=r"^[^\n]*422[^\n]*by\.0: [^\n]*$"):
        client.usage(by=["teem"])
    with pytest.raises(Unanswered, match="not an address"):
        gputally.connect("accountant:8080")


def test_jobs_with_exact_costs(client: Client) -> None:
    frame = client.jobs(START_MS, START_MS + HOUR_MS)
    assert len(frame) == len(set(frame.id)) > 0
    costs = client.cost(START_MS, START_MS + HOUR_MS, by=["cluster", "namespace", "job"])
    held = costs[costs.job != ""]
    assert frame[["busy_gpu_us", "allocated_idle_gpu_us", "allocated_unknown_gpu_us"]].sum().sum() == held.gpu_us.sum()
    assert frame.attrs["currency"] == costs.currency.iloc[0]
    assert sum(frame.cost) == frame.attrs["total_cost"] == sum(held.cost)
    with pytest.raises(Unanswered, match=r"404 .* no team 'nobody' is known; known are 'vision'"):
        client.jobs(START_MS, START_MS + HOUR_MS, where={"team": "nobody"})


NOTEBOOK = """
import sys
if sys.argv[2] == "before":
    import agent, dashboards
import gputally
from pathlib import Path
books = gputally.connect(sys.argv[1])
assert len(books.usage({start}, {end}, by=["team", "pod"]))
assert len(books.cost({start}, {end}))
assert books.statement("2026-10").attrs["hash"]
assert len(books.jobs({start}, {end}))
books.decisions({start}, {end})
try:
    gputally.connect(sys.argv[1]).usage({start}, {end}, by=["nothing"])
except Exception as error:
    assert type(error).__name__ == "Unanswered", error
import agent, dashboards
assert agent.MINE == dashboards.MINE == 42
assert Path(agent.__file__).parent == Path.cwd()
import agent as again
assert again is agent
print("ok")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_modules_of_the_users_own_with_our_names_break_nothing(client: Client, tmp_path: Path, when: str) -> None:
    """A notebook with its own modules `agent` and `dashboards`, imported before the client or after it."""
    for name in ("agent.py", "dashboards.py"):
        (tmp_path / name).write_text("MINE = 42\n")
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(start=START_MS, end=START_MS + HOUR_MS))
    url = client._accountant.url
    command = [sys.executable, "notebook.py", url, when]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
