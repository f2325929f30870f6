"""While the mark of a span stays equal, so do all answers about it, whatever comes in: records and facts in any order
and with any times, also those that make no sense."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from accountant.core.errors import CannotRetire
from accountant.ledger.protocols import Down, EpochReport, Facts, JobKey, NamespaceFacts, NodeFacts, Retirement
from accountant.ledger.usage import LENT, MEASURES, START_UP
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.wire.policy_models import Policy, QueuePolicy
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

START_MS = 1_790_812_800_000
DAYS = 3
EDGES = [START_MS + day * MS_PER_DAY for day in range(DAYS + 1)]
NOW_MS = EDGES[-1]
GPUS = ("g0", "g1")
QUEUES = ("kai:red", "kai:blue")

HOURS = st.integers(0, DAYS * 24 - 1).map(lambda hour: START_MS + hour * MS_PER_HOUR)
SELDOM = st.one_of(st.none(), HOURS)
PODS = st.sampled_from(["a", "b"])
FACTS = st.fixed_dictionaries(
    {
        "name": PODS, "created_ms": SELDOM, "scheduled_ms": SELDOM, "started_ms": SELDOM, "ended_ms": SELDOM,
        "observed_ms": HOURS, "workload": st.sampled_from(["PyTorchJob/j", "Job/j"]),
        "queue_ref": st.sampled_from(QUEUES), "labels": st.sampled_from([{}, {"who": "x"}, {"who": "y"}]),
    }
)  # fmt: skip
NODES = st.builds(
    lambda pool, down, deleted, renewed: NodeFacts(
        "c", "n", pool=pool, down=tuple(down), deleted_ms=deleted, renewed_ms=tuple(renewed)
    ),
    st.sampled_from(["", "x", "y"]),
    st.lists(st.builds(lambda at: Down(at, at + MS_PER_HOUR, "NotReady"), HOURS), max_size=1),
    SELDOM,
    st.lists(HOURS, max_size=1),
)
SPACES = st.builds(
    lambda team, since: NamespaceFacts("c", "ns", team, "who", (team,), since), st.sampled_from(["t", "u"]), SELDOM
)
STEPS = st.one_of(
    st.tuples(st.just("row"), st.tuples(st.sampled_from(GPUS), PODS, HOURS, st.just("n"))),
    st.tuples(st.just("row"), st.tuples(st.sampled_from(GPUS), PODS, HOURS, st.sampled_from(["n", "m"]))),
    st.tuples(st.just("told by the node"), FACTS),
    st.tuples(st.just("told by the API server"), FACTS),
    st.tuples(st.just("node"), st.tuples(NODES, SELDOM)),
    st.tuples(st.just("namespace"), st.tuples(SPACES, SELDOM)),
    st.tuples(st.just("policy"), st.tuples(st.sampled_from(["red", "blue"]), HOURS)),
    st.tuples(st.just("epoch"), st.tuples(st.integers(0, 1), HOURS)),
    st.tuples(st.just("retired"), HOURS),
    st.tuples(st.just("checkpoint"), st.none()),
)


def taken(ledger: DuckLedger, number: int, step: tuple[str, Any]) -> None:
    """Let the ledger take one step. An agent sends each batch from an outbox of its own, `number`."""
    what, given = step
    if what == "row":
        gpu, pod, at_ms, node = given
        row = interval(at_ms, gpu, pod_holder(pod if node == "n" else f"{pod} of {node}"), busy_us=100_000_000)
        deliver(ledger, NOW_MS, batch([row], node=node, epoch=f"{node}{number}"))
    elif what == "told by the node":
        deliver(ledger, NOW_MS, batch([], [pod_facts(**given)], epoch=f"n{number}"))
    elif what == "told by the API server":
        ledger.observe(Facts(pods=(("c", pod_facts(**given)),)), NOW_MS)
    elif what in ("node", "namespace"):
        fact, closed_ms = given
        facts = Facts(nodes=(fact,)) if what == "node" else Facts(namespaces=(fact,))
        ledger.observe(facts, NOW_MS, closed_ms or 0)
    elif what == "policy":
        team, at_ms = given
        ledger.put_policy(Policy(queues=(QueuePolicy(name="q", team=team, refs=QUEUES),)), at_ms)
    elif what == "epoch":
        ledger.report_epochs([EpochReport(JobKey("c", "ns", "Job/j"), given[0], given[1], "ada")], NOW_MS)
    elif what == "retired":
        with suppress(CannotRetire):
            ledger.retire(Retirement(gpus=(GPUS[0],)), given, NOW_MS, "ada", "sold")
    else:
        ledger.checkpoint()


def answers(ledger: DuckLedger) -> list[Any]:
    """What is known of each day."""
    by = ("team", "queue", "job", "pod", "node", "pool", "label:who")
    with ledger.moment(EDGES[0], EDGES[-1]) as moment:
        usage = moment.usage(EDGES, by, None, "UTC", (*MEASURES, *START_UP, *LENT))
        found = []
        for day, span in enumerate(pairwise(EDGES)):
            pods = sorted(repr(pod) for pod in moment.pods(*span, placed=True))
            figures = [
                (key, row) for at, key, row in zip(usage.span, usage.row_keys(), usage.figures.tolist(), strict=True)
                if at == day
            ]  # fmt: skip
            found.append((figures, pods, moment.pods_by_job(*span), moment.epochs(span)))
    return found


def marks(ledger: DuckLedger) -> list[Any]:
    status = ledger.status()
    return [status.mark(*span) for span in pairwise(EDGES)]


@given(st.lists(STEPS, min_size=2, max_size=10))
@settings(
    max_examples=examples(5, 80), deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)  # fmt: skip
def test_a_span_whose_mark_stays_equal_keeps_its_answers(steps):
    with TemporaryDirectory() as folder:
        place, clock = fresh(Path(folder) / "ledger.duckdb"), VirtualClock(NOW_MS)
        ledger = open_ledger(place, clock, exported_labels=("who",), gpu_move_after_ms=0)
        try:
            known, told = marks(ledger), answers(ledger)
            for number, step in enumerate(steps):
                taken(ledger, number, step)
                now, tells = marks(ledger), answers(ledger)
                for day in range(DAYS):
                    if now[day] == known[day]:
                        assert tells[day] == told[day], (step, f"day {day} has the same mark")
                known, told = now, tells
        finally:
            ledger.close()
