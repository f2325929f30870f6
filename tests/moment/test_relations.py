"""What else a moment knows agrees with its usage: holds, pods, acts, decisions, windows and its status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import pytest

from accountant.core.errors import UnsupportedQuestion
from accountant.fleet.fleet_ledgers import FleetQuery
from accountant.ledger.protocols import JobKey, Moment
from accountant.ledger.usage import HELD, LENT
from accountant.wire.policy_models import IDLE, UNASSIGNED, Decision, WindowSpec
from accountant.wire.usage_cost_and_job_models import Dimension
from gputally.base.units import MS_PER_HOUR
from tests.lake.comparison_queries import HOUR, JOB, QUESTIONS, SPAN
from tests.ledger.conftest import MINUTE, START_MS
from tests.moment.conftest import Several, capacity
from tests.usage_relation import figures_of

OF_JOB: tuple[Dimension, ...] = ("cluster", "namespace", "job")
OF_POD: tuple[Dimension, ...] = (*OF_JOB, "pod")
WINDOW = WindowSpec(size=4 * 3_600)
WINDOWED = SPAN[1] - 4 * HOUR, SPAN[1]

Cannot = Mapping[str, tuple[Callable[[Moment], object], str]]
"""Questions by name, and what the refusal names."""
NOT_KEPT: Mapping[str, Cannot] = {
    "duckdb": {
        "a label": (lambda one: one.usage(SPAN, ("label:stage",)), "stage"),  # type: ignore[arg-type]
        "a cost without prices": (lambda one: one.window(WINDOW, SPAN[1], "cost", 0.5), "price book"),
    },
    "lake": {
        "holds": (lambda one: one.holds([SPAN], of=[JOB]), "both"),
        "owners": (lambda one: one.gpu_owners(), "both"),
        "a label": (lambda one: one.usage(SPAN, ("label:stage",)), "stage"),  # type: ignore[arg-type]
        "a label's value": (lambda one: one.usage(SPAN, ("team",), {"label:stage": ("x",)}), "stage"),  # type: ignore[dict-item]
        "lent time": (lambda one: one.usage(SPAN, ("team",), measures=LENT), r"both: .*shared_gpus: busy"),
        "the begin of an hour": (
            lambda one: one.usage((SPAN[0] + MINUTE, SPAN[1]), ("team",)),
            r"between 2026-10-01T0\d:00:00Z and 2026-10-01T0\d:00:00Z",
        ),
        "the end of an hour": (
            lambda one: one.usage((SPAN[0], START_MS + 2 * HOUR - MINUTE), ("team",)),
            r"between 2026-10-01T0\d:00:00Z and 2026-10-01T0\d:00:00Z",
        ),
        "a minute": (lambda one: one.usage((SPAN[0] + MINUTE, SPAN[0] + 2 * MINUTE), ("team",)), "inside an hour"),
        **{
            f"a window {name}": (lambda one, spec=spec, at=at, what=what: one.window(spec, at, what, 0.5), "accountant")
            for name, spec, at, what in (
                ("of energy", WINDOW, SPAN[1], "energy"),
                ("by period", WindowSpec(half_life=3_600, decay="slurm"), SPAN[1], "allocated"),
                ("with weights", WindowSpec(gpu_weights={"H100": Decimal(2)}), SPAN[1], "allocated"),
                ("that ends inside an hour", WINDOW, SPAN[1] - MINUTE, "allocated"),
            )
        },
        "the quarantine": (lambda one: one.quarantined(), "quarantine"),
        "missing records": (lambda one: one.holes(), "missing"),
        "what is misdated": (lambda one: one.misdated(SPAN[1]), "future"),
        "an imbalance": (lambda one: one.imbalance(*SPAN), "rows"),
        "saved views": (lambda one: one.views("ada"), "saved views"),  # type: ignore[attr-defined]
    },
    "memory": {
        "holds": (lambda one: one.holds([SPAN], of=[JOB]), "held"),
        "owners": (lambda one: one.gpu_owners(), "owners"),
        "a cost": (lambda one: one.window(WINDOW, SPAN[1], "cost", 0.5), "windows"),
    },
}


@pytest.fixture(params=["duckdb", "lake", "memory"])
def moment(request: pytest.FixtureRequest, several: Several) -> Moment:
    return several.of[request.param].moment


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_lake_answers_as_the_ledger(several: Several, name: str) -> None:
    answer = QUESTIONS[name](several.of["lake"].moment)
    assert answer == QUESTIONS[name](several.truth)
    assert answer or name in ("usage of an empty span", "what a name with quotes held"), "the question tells something"


@pytest.mark.parametrize(("name", "question"), [(name, one) for name, of in NOT_KEPT.items() for one in of])
def test_what_is_not_kept_is_refused_by_name(several: Several, name: str, question: str) -> None:
    ask, named = NOT_KEPT[name][question]
    with pytest.raises(UnsupportedQuestion, match=named):
        ask(several.of[name].moment)


Asked = Mapping[str, Callable[[Moment], object]]
ASKED: Asked = {
    "status": lambda one: one.status().extent[0],
    "usage": lambda one: figures_of(one.usage(SPAN, ("team",), measures=())),
    "window": lambda one: one.window(WINDOW, SPAN[1], "busy", 0.5).usage,
    "acts": lambda one: one.acts(),
    "decisions": lambda one: one.decisions(*SPAN),
    "holds": lambda one: one.holds([SPAN], of=[JOB]),
    "pods": lambda one: [*one.pods(*SPAN)],
    "pods_by_job": lambda one: one.pods_by_job(*SPAN),
    "extents": lambda one: {*one.extents([JOB])},
    "jobs_in": lambda one: one.jobs_in(JOB.cluster, JOB.namespace),
    "job_of": lambda one: one.job_of(JOB.cluster, "p1"),
    "epochs": lambda one: one.epochs(),
    "epoch_counts": lambda one: one.epoch_counts([JOB]),
    "gpu_owners": lambda one: one.gpu_owners(),
    "quarantined": lambda one: one.quarantined(),
    "holes": lambda one: one.holes(),
    "misdated": lambda one: one.misdated(SPAN[1]),
    "imbalance": lambda one: one.imbalance(*SPAN).lines,
}
"""A question for each method of a moment."""
FAULTS = {"quarantined", "holes", "misdated", "imbalance"}
"""The ledger has none of these, so that their answer tells nothing of whether they are kept."""


def test_every_question_is_asked() -> None:
    assert ASKED.keys() == {name for name in dir(Moment) if not name.startswith("_")}


@pytest.mark.parametrize("of", ["lake", "memory"])
@pytest.mark.parametrize("name", ASKED)
def test_a_moment_that_cannot_answer_refuses(several: Several, of: str, name: str) -> None:
    """It never answers with nothing, which would be taken for the whole answer."""
    expected = ASKED[name](several.truth)
    assert bool(expected) == (name not in FAULTS)
    moment = several.of[of].moment
    if (answer := _answered(ASKED[name], moment)) is None:
        with pytest.raises(UnsupportedQuestion, match="accountant of both" if of == "lake" else "does not keep"):
            ASKED[name](moment)
    else:
        assert answer == expected
        assert answer or of == "memory", "nothing is no answer to what is not published"


def _answered(ask: Callable[[Moment], object], moment: Moment) -> object:
    try:
        return ask(moment)
    except UnsupportedQuestion:
        return None


def held(moment: Moment, by: tuple[Dimension, ...], span: tuple[int, int] = SPAN) -> dict[tuple[str, ...], int]:
    usage = moment.usage(span, by, measures=())
    return {key: sum(row) for key, row in figures_of(usage, HELD).items()}


def test_holds_are_the_held_time(several: Several) -> None:
    """Time of holders while a GPU is down is held as well."""
    moment = several.truth
    jobs = [JobKey(*key) for key in held(moment, OF_JOB)]
    found = moment.holds([SPAN], of=jobs)
    assert found.whole_after_ms is None
    sums: Counter[tuple[str, ...]] = Counter()
    for hold in found.found:
        assert SPAN[0] <= hold.start_ms < hold.end_ms <= SPAN[1]
        sums[*hold.key, hold.pod, hold.team, hold.queue, hold.node, hold.gpu] += hold.gpu_us
    assert sums == held(moment, (*OF_POD, "team", "queue", "node", "gpu"))
    gpus = [("prod", "gpu-1")]
    assert moment.holds([SPAN], gpus=gpus).found == tuple(h for h in found.found if (h.key.cluster, h.gpu) in gpus)


def test_pods_are_those_that_held_something(moment: Moment) -> None:
    pods = [*moment.pods(*SPAN, placed=True)]
    assert [(pod.cluster, pod.facts.uid) for pod in pods] == sorted({(pod.cluster, pod.facts.uid) for pod in pods})
    assert {(*pod.key, pod.facts.name) for pod in pods} >= held(moment, OF_POD).keys()
    job = pods[0].key
    assert [*moment.pods(*SPAN, placed=True, of=(job,))] == [pod for pod in pods if pod.key == job]
    text = pods[0].facts.name.upper()
    assert [*moment.pods(*SPAN, placed=True, named=text)] == [pod for pod in pods if pod.is_named(text)]
    assert not [*moment.pods(*SPAN, placed=True, named="no such pod")]
    created = [*moment.pods(*SPAN)]
    assert {*map(repr, moment.pods(*SPAN, ordered=False))} == {*map(repr, created)}
    by_job = moment.pods_by_job(*SPAN)
    assert {key: count.pods for key, count in by_job.items()} == Counter(pod.key for pod in created)
    assert moment.jobs_in(job.cluster, job.namespace) == {
        pod.key.job for pod in pods if (pod.cluster, pod.facts.namespace) == (job.cluster, job.namespace)
    }
    assert {moment.job_of(pod.cluster, pod.facts.uid) for pod in pods} == {pod.key for pod in pods}
    assert moment.job_of("prod", "nobody") is None


def test_a_job_holds_nothing_outside_its_extent(moment: Moment) -> None:
    jobs = held(moment, OF_JOB)
    assert all(job for _, _, job in jobs), "a holder without a workload is its own job"
    extents = moment.extents([JobKey(*key) for key in (*jobs, ("prod", "ns-0", "Job/nobody"))])
    assert {*extents} == {JobKey(*key) for key in jobs}
    for key, (start_ms, end_ms) in extents.items():
        hours = start_ms - start_ms % MS_PER_HOUR, end_ms + -end_ms % MS_PER_HOUR
        assert held(moment, OF_JOB, hours)[tuple(key)] == jobs[tuple(key)]


def test_epochs_are_counted_as_listed(moment: Moment) -> None:
    epochs = moment.epochs()
    keys = {one.key for one in epochs}
    assert [one.at_ms for one in moment.epochs(SPAN)] == [one.at_ms for one in epochs if one.at_ms < SPAN[1]]
    assert moment.epoch_counts([*keys, JobKey("prod", "ns-0", "Job/nobody")]) == Counter(one.key for one in epochs)
    assert [*moment.epochs(of=(min(keys),))] == [one for one in epochs if one.key == min(keys)]


def test_acts_are_numbered_one_after_the_other(moment: Moment) -> None:
    acts = moment.acts()
    assert [act.number for act in acts] == [*range(1, moment.status().last_act + 1)]
    for part in range(len(acts) + 1):
        assert moment.acts(after=part) == acts[part:]
        assert moment.acts(limit=part) == acts[:part]
    kind, subject = acts[0].kind, acts[0].subject
    assert moment.acts(kind) == [act for act in acts if act.kind == kind]
    assert moment.acts(subject=subject) == [act for act in acts if act.subject == subject]


def test_decisions_are_newest_first_and_read_in_parts(moment: Moment) -> None:
    decisions = moment.decisions(*SPAN)
    assert decisions == sorted(decisions, key=lambda one: (one.at_ms, one.key), reverse=True)

    def parts() -> Iterator[Decision]:
        end_ms, before = SPAN[1], None
        while found := moment.decisions(SPAN[0], end_ms, 2, before=before):
            yield from found
            end_ms, before = found[-1].at_ms + 1, found[-1].key

    assert [*parts()] == decisions
    for filters in ({"kind": "weight"}, {"cluster": "lab"}, {"subject": decisions[0].subject}):
        ((name, value),) = filters.items()
        assert moment.decisions(*SPAN, **filters) == [one for one in decisions if getattr(one, name) == value]  # type: ignore[arg-type]


def test_the_status_is_that_of_the_usage(moment: Moment) -> None:
    status = moment.status()
    first_ms, newest_ms = status.extent
    assert capacity(0, first_ms) == 0 < capacity(first_ms, first_ms + 1)
    assert newest_ms == status.newest_ms == max(status.newest_by_cluster.values())
    assert newest_ms == max(status.newest_by_node.values())
    usage = moment.usage(SPAN, ("cluster", "node", "gpu"))
    assert status.gpus_at(*SPAN) == Counter(key[:2] for key in figures_of(usage))
    assert {*status.clusters} == {cluster for cluster, *_ in figures_of(usage)} == {*status.newest_by_cluster}
    assert {(node.cluster, node.name) for node in status.nodes} == {key[:2] for key in figures_of(usage)}
    assert {*status.newest_by_node} == {key[:2] for key in figures_of(usage)}
    assert status.gpu_hours(*SPAN) * MS_PER_HOUR * 1_000 <= capacity(*SPAN)
    assert {*status.teams} <= {team for (team,) in held(moment, ("team",))} | {""}


def test_gpus_belong_to_the_nodes_of_their_usage(several: Several) -> None:
    owners = several.truth.gpu_owners()
    assert {(one.cluster, one.owners[-1].node, one.gpu_uuid) for one in owners} == {
        *figures_of(several.truth.usage(SPAN, ("cluster", "node", "gpu")))
    }


def test_nothing_is_out_of_balance(several: Several) -> None:
    found = several.truth.imbalance(*SPAN)
    assert (found.lines, found.quarantined, several.truth.quarantined()) == ((), 0, [])


@pytest.mark.parametrize("measure", ["allocated", "busy"])
def test_a_window_is_the_usage_of_its_span(several: Several, moment: Moment, measure: Any) -> None:
    window = moment.window(WINDOW, SPAN[1], measure, 0.5)
    accounts = {line.key["queue"]: line.accounts_gpu_us for line in moment.usage(WINDOWED, ("queue",)).lines()}
    used = {queue: getattr(one, measure) for queue, one in accounts.items() if queue != IDLE}
    assert window.usage | {UNASSIGNED: window.unassigned} == used
    assert window.capacity == sum(one.total - one.down for one in accounts.values())
    alone = [several.truth.window(WINDOW, SPAN[1], measure, 0.5, cluster=name).coverage for name in ("prod", "lab")]
    fleet = several.fleet.window(several.members, WINDOW, SPAN[1], measure)
    assert (fleet.usage, fleet.unassigned, fleet.capacity) == (window.usage, window.unassigned, window.capacity)
    assert fleet.coverage == min(alone) <= window.coverage
    assert (fleet.start_ms, fleet.end_ms, fleet.unit) == (window.start_ms, window.end_ms, window.unit)
    for cluster in ("prod", "lab"):
        of_one = moment.window(WINDOW, SPAN[1], measure, 0.5, cluster=cluster)
        queues = moment.usage(WINDOWED, ("queue",), {"cluster": (cluster,)}).lines()
        assert of_one.capacity == sum(one.accounts_gpu_us.total - one.accounts_gpu_us.down for one in queues)


def test_a_fleet_does_not_answer_about_a_label_that_no_ledger_exports(several: Several) -> None:
    with pytest.raises(UnsupportedQuestion, match="stage"):
        several.fleet.usage(several.members, FleetQuery(*SPAN, ("label:stage",)))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedQuestion, match="accountant"):
        several.fleet.window(several.members, WINDOW, SPAN[1], "energy")
