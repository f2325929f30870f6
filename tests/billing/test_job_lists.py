"""Lists of jobs: what is not shown is counted by the ledger and not read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from decimal import Decimal
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from accountant.billing.job_costs import JobChoice, JobFigures, JobList, chosen, list_jobs
from accountant.billing.queue_waits import pod_wait, pods_by_job
from accountant.ledger.protocols import Facts, JobKey, QueuedPod
from accountant.ledger.usage import Where
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.read_snapshot import Snapshot
from accountant.wire.option_types import Order
from agent.wire import PodFacts
from gputally.base.clock import VirtualClock
from gputally.base.pod_stop import DELETED, FAILED, PodStop
from gputally.base.units import MS_PER_MINUTE
from tests.empty_ledger import fresh
from tests.usage_records import QUARTER_MS, batch, deliver, interval, pod_facts, pod_holder

START, JOBS = 1_790_812_800_000, 12  # 2026-10-01T00:00:00Z
END = START + JOBS * QUARTER_MS


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DuckLedger]:
    """A GPU that each job holds for a quarter of an hour; pods of which the node, the API server or both know which
    instants, in every combination; in three namespaces that are teams."""
    clock = VirtualClock(END)
    opened = open_ledger(fresh(tmp_path_factory.mktemp("jobs") / "ledger.duckdb"), clock)
    known: list[dict[str, int] | None] = [None]
    known += [
        dict(zip(("scheduled_ms", "started_ms", "ended_ms"), (START + 1, START + 2, START + 3), strict=True)),
        *({name: START + 5} for name in ("scheduled_ms", "started_ms", "ended_ms")), {},
    ]  # fmt: skip
    of_nodes, of_cluster = list[PodFacts](), list[tuple[str, PodFacts]]()
    for number, (node, seen, newer) in enumerate(product(known, known, (0, 1))):
        facts = pod_facts(f"pod-{number}", START + 10, namespace=f"team-{number % 3}", created_ms=START - number)
        workload = f"Job/job-{number % JOBS}" if number % 5 else ""
        of_node, of_both = (PodStop(FAILED) if number % 4 in some else None for some in ((1, 2), (2, 3)))
        if node is not None:
            of_nodes.append(replace(facts, workload=workload, stop=of_node, **node))
        if seen is not None:
            facts = replace(facts, stop=of_both)
            of_cluster.append(("prod", replace(facts, observed_ms=START + 9 + 2 * newer, workload=workload,
                                               **{name: at + 7 for name, at in seen.items()})))  # fmt: skip
    rows = [
        interval(START + n * QUARTER_MS, "g", pod_holder(f"pod-{n}", f"team-{n % 3}"), busy_us=1000)
        for n in range(JOBS)
    ]
    deliver(opened, END, batch(rows, of_nodes, cluster="prod"))
    opened.observe(Facts(pods=tuple(of_cluster)), END)
    yield opened
    opened.close()


class Recording:
    """A moment of the ledger that notes of which jobs pods are read."""

    def __init__(self, moment: Snapshot) -> None:
        self._moment, self.read_of = moment, list[Collection[JobKey] | None]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._moment, name)

    def pods(
        self, start_ms: int, end_ms: int, *, of: Collection[JobKey] | None = None, ordered: bool = True
    ) -> Iterator[QueuedPod]:
        self.read_of.append(of)
        return self._moment.pods(start_ms, end_ms, of=of, ordered=ordered)


def test_the_numbers_of_pods_are_those_of_the_pods_whoever_knows_what(ledger: DuckLedger) -> None:
    with ledger.moment(START, END) as moment:
        pods = list(moment.pods(START, END))
        assert len({pod.key for pod in pods}) > JOBS
        assert moment.pods_by_job(START, END) == pods_by_job(pods)
        assert len({of_job.failed_ms for of_job in moment.pods_by_job(START, END).values()}) > 2


@pytest.mark.parametrize("where", [None, {"namespace": ("team-1",)}])
def test_jobs_are_ordered_by_the_longest_wait_of_their_pods(ledger: DuckLedger, where: Where | None) -> None:
    with ledger.moment(START, END) as moment:
        waits: dict[JobKey, int] = {}
        for pod in list(moment.pods(START, END)):
            queued = pod_wait(pod.facts, END).queued_ms
            if queued is not None:
                waits[pod.key] = max(queued, waits.get(pod.key, 0))
        listed = list_jobs(moment, None, START, END, END, where)
        in_order = chosen(listed, JobChoice(order=Order("waited", descending=True)))
        assert {one.key: one.waited_ms for one in in_order} == {one.key: waits.get(one.key) for one in listed.figures}
        assert [job.waited_ms for job in listed.built(in_order)] == sorted(
            (one.waited_ms for one in listed.figures), key=lambda wait: -1 if wait is None else wait, reverse=True
        )


@pytest.mark.parametrize(("descending", "names"), [(True, "dear cheap more less"), (False, "cheap dear less more")])
def test_a_cost_that_is_not_known_is_last_in_both_orders(descending: bool, names: str) -> None:
    costs = {"less": (1, None), "more": (9, None), "cheap": (5, Decimal(1)), "dear": (2, Decimal(7))}
    figures = [JobFigures(JobKey("", "", name), "ended", held, 0, cost) for name, (held, cost) in costs.items()]
    listed = cast(JobList, SimpleNamespace(figures=figures))
    found = chosen(listed, JobChoice(order=Order("cost", descending=descending)))
    assert [one.key.job for one in found] == names.split()


@pytest.mark.parametrize("where", [None, {"namespace": ("team-1",)}])
def test_a_list_reads_the_pods_of_the_jobs_that_it_shows_alone(ledger: DuckLedger, where: Where | None) -> None:
    with ledger.moment(START, END) as moment:
        recording = Recording(moment)
        listed: JobList = list_jobs(recording, None, START, END, END, where)  # type: ignore[arg-type]
        assert recording.read_of == ([None] if where else [])
        recording.read_of.clear()
        assert {one.state for one in listed.figures} - {"failed"} == {"running", "ended", "waiting"}
        shown = listed.figures[2:4]
        built = list(listed.built(shown))
        assert recording.read_of == [{one.key for one in shown}]
        whole = {job.id: job for job in listed.built(listed.figures)}
        assert len(recording.read_of) == 2, "the pods of a list are read once, however many jobs it has"
    assert built == [whole[one.key.id] for one in shown]
    assert [job.state for job in whole.values()] == [one.state for one in listed.figures]
    assert sum(job.accounts_gpu_us.allocated for job in whole.values()) == sum(o.allocated_us for o in listed.figures)


@pytest.mark.parametrize("where", [None, {"namespace": ("team-1",)}])
def test_a_job_is_found_by_the_name_of_each_of_its_pods(ledger: DuckLedger, where: Where | None) -> None:
    with ledger.moment(START, END) as moment:
        listed = list_jobs(moment, None, START, END, END, where)
        shown = {one.key for one in listed.figures}
        pods = [pod for pod in moment.pods(START, END) if pod.key in shown]
        for pod in pods[::7]:
            mine = pod.facts.name
            for text in (mine, f"{pod.facts.namespace}/{mine.upper()}", f"prod/{pod.facts.namespace}/{mine}"):
                found = {one.key: one.pod for one in chosen(listed, JobChoice(text))}
                by_path = text.lower() in f"{pod.cluster}/{pod.key.namespace}/{pod.key.job}".lower()
                assert found[pod.key] == ("" if by_path else mine)
                assert found.keys() == {
                    other.key for other in pods
                    if text.lower() in f"prod/{other.facts.namespace}/{other.facts.name}"
                    or text.lower() in f"{other.cluster}/{other.key.namespace}/{other.key.job}".lower()
                }  # fmt: skip
        assert not chosen(listed, JobChoice("no such pod"))
        (built,) = listed.built(chosen(listed, JobChoice(pods[0].facts.name))[:1])
        assert pods[0].facts.name in (built.pod or built.job)


@pytest.mark.parametrize(("second", "state"), [
    ({}, "waiting"), ({"scheduled_ms": END - 2 * MS_PER_MINUTE}, "running"),
    ({"ended_ms": END - MS_PER_MINUTE}, "ended"),
])  # fmt: skip
def test_a_job_whose_pod_was_stopped_waits_while_the_next_one_does(
    tmp_path: Path, second: Mapping[str, int], state: str
) -> None:
    stopped = pod_facts("stopped", START + 10, created_ms=START, scheduled_ms=START, started_ms=START,
                        ended_ms=START + QUARTER_MS, workload="Job/train", namespace="team")  # fmt: skip
    follows = pod_facts("next", START + QUARTER_MS + 10, created_ms=START + QUARTER_MS, workload="Job/train",
                        namespace="team", **second)  # fmt: skip
    rows = [interval(START, "g", pod_holder("stopped", "team"), busy_us=1000)]
    with closing(open_ledger(fresh(tmp_path / "ledger.duckdb"), VirtualClock(END))) as opened:
        deliver(opened, END, batch(rows, [stopped, follows], cluster="prod"))
        with opened.moment(START, END) as moment:
            listed = list_jobs(moment, None, START, END, END, None)
            assert [one.state for one in listed.figures] == [state]
            assert moment.pods_by_job(START, END) == pods_by_job(moment.pods(START, END))


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (FAILED, None, "failed"),
        (FAILED, {"created_ms": START, "stop": PodStop(DELETED)}, "failed"),
        (FAILED, {"created_ms": START + 2 * QUARTER_MS}, "ended"),
        (DELETED, {"created_ms": START + 2 * QUARTER_MS, "stop": PodStop(FAILED)}, "failed"),
        (DELETED, None, "ended"),
    ],
)
def test_a_job_failed_if_a_pod_ended_with_an_error_and_none_was_created_after_it(
    tmp_path: Path, first: str, second: Mapping[str, Any] | None, state: str
) -> None:
    """In a gang the others are deleted then; a pod that was created later is another try."""
    at = {"scheduled_ms": START, "started_ms": START, "workload": "Job/train", "namespace": "team"}
    pods = [pod_facts("first", START + 10, created_ms=START, ended_ms=START + QUARTER_MS, stop=PodStop(first), **at)]
    if second is not None:
        pods.append(pod_facts("second", START + 10, ended_ms=START + 3 * QUARTER_MS, **at, **second))
    rows = [interval(START, "g", pod_holder("first", "team"), busy_us=1000)]
    with closing(open_ledger(fresh(tmp_path / "ledger.duckdb"), VirtualClock(END))) as opened:
        deliver(opened, END, batch(rows, pods, cluster="prod"))
        with opened.moment(START, END) as moment:
            listed = list_jobs(moment, None, START, END, END, None)
            assert [one.state for one in listed.figures] == [state]
            (job,) = listed.built(chosen(listed, JobChoice(), "failed" if state == "failed" else "ended"))
            assert job.ended_ms == (START + QUARTER_MS if second is None else START + 3 * QUARTER_MS)
            assert moment.pods_by_job(START, END) == pods_by_job(moment.pods(START, END))
