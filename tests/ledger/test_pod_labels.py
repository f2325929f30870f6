"""Exported labels of pods are dimensions: their values are those in force at each instant, and what is not known, not
set or too much has a name of its own."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.errors import UnsupportedQuestion
from accountant.core.settings import Quotas
from accountant.ledger.protocols import Facts
from accountant.ledger.usage import ACCOUNTS
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.storage.folder_or_object_store import in_folder
from accountant.wire.policy_models import IDLE, UNASSIGNED
from accountant.wire.usage_cost_and_job_models import OTHER_VALUE, Dimension, label_dimension
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.hypothesis_examples import examples
from tests.ledger.conftest import MINUTE, START_MS, Hand, booked
from tests.moments import present

PROJECT, CENTRE = label_dimension("project"), label_dimension("example.com/cost-center")
EXPORTED = ("project", "example.com/cost-center")
QUARTER_US = 15 * MINUTE * 1000
HAND = Hand(now_ms=START_MS + 600 * MINUTE)


def quarters(*pods: str | None, first: int = 1, namespace: str = "vision", **changes):
    """One GPU of 1 quarter-hour after the other, each held by a pod, or by nobody."""
    return [
        HAND.row(
            first + at, 15 * at, 15 * at + 15, holder=None if pod is None else Holder("pod", pod, namespace, pod),
            **changes,
        )
        for at, pod in enumerate(pods)
    ]  # fmt: skip


def seen(ledger: DuckLedger, pod: str, minute: float, namespace: str = "vision", **labels: str) -> None:
    """The API server shows a pod with these labels."""
    fact = HAND.fact(
        1, pod, namespace=namespace, name=pod, created_ms=START_MS, observed_ms=START_MS + round(minute * MINUTE),
        labels={name.replace("cost_center", "example.com/cost-center"): value for name, value in labels.items()},
    )  # fmt: skip
    ledger.observe(Facts(pods=(("prod", fact),)), HAND.now_ms)


def held(ledger: DuckLedger, *by: Dimension, until: float = 600, where=None) -> dict[tuple[str, ...], int]:
    """The time that pods held or that was free, in quarter-hours, by these dimensions."""
    usage = present(ledger).usage((START_MS, START_MS + round(until * MINUTE)), by, where)
    metered = usage.columns(ACCOUNTS[:4]).sum(axis=1).tolist()
    return {key: us // QUARTER_US for key, us in zip(usage.row_keys(), metered, strict=True) if us}


def test_time_counts_for_the_label_that_a_pod_has_at_each_instant(opened, path):
    ledger = opened(fresh(path), exported_labels=EXPORTED)
    booked(ledger, HAND.now_ms, HAND.batch(*quarters("a", "a", "a", "a", "b", None, "unseen")))
    seen(ledger, "a", 5, project="vision")
    seen(ledger, "b", 65, cost_center="4711")
    assert held(ledger, PROJECT) == {("vision",): 4, (UNASSIGNED,): 1, (IDLE,): 1, ("",): 1}
    seen(ledger, "a", 31, project="nlp", cost_center="12")
    assert held(ledger, PROJECT) == {("vision",): 3, ("nlp",): 1, (UNASSIGNED,): 1, (IDLE,): 1, ("",): 1}
    assert held(ledger, PROJECT, CENTRE)["vision", UNASSIGNED] == 3, "a change moves no earlier time"
    assert held(ledger, CENTRE, where={PROJECT: ("nlp",)}) == {("12",): 1}
    assert held(ledger, CENTRE, where={PROJECT: (UNASSIGNED, IDLE)}) == {("4711",): 1, (IDLE,): 1}
    assert held(ledger, PROJECT, where={"pod": ("a",)}) == {("vision",): 3, ("nlp",): 1}
    seen(ledger, "a", 46)
    assert held(ledger, PROJECT, where={"pod": ("a",)}) == {("vision",): 3, ("nlp",): 1}, "it ended before"


def test_an_agent_that_does_not_send_a_label_leaves_it_unknown_and_changes_nothing(opened, path):
    ledger = opened(fresh(path), exported_labels=EXPORTED)
    booked(ledger, HAND.now_ms, HAND.batch(*quarters("a", "a"), HAND.fact(3, "a", labels={"project": "vision"})))
    assert held(ledger, PROJECT, CENTRE) == {("vision", ""): 2}
    booked(ledger, HAND.now_ms, HAND.batch(HAND.fact(4, "a", observed_ms=START_MS + 5 * MINUTE, labels={"other": "x"})))
    assert held(ledger, PROJECT) == {("vision",): 2}


def test_a_label_that_is_not_exported_is_refused_and_kept_out(opened, path):
    ledger = opened(fresh(path), exported_labels=("project",))
    booked(ledger, HAND.now_ms, HAND.batch(*quarters("a")))
    seen(ledger, "a", 1, project="vision", cost_center="4711")
    with pytest.raises(UnsupportedQuestion):
        held(ledger, CENTRE)
    with pytest.raises(UnsupportedQuestion):
        held(ledger, "team", where={CENTRE: ("4711",)})


def test_the_values_of_one_namespace_are_bounded_and_leave_room_for_others(opened, path):
    ledger = opened(fresh(path), exported_labels=("project",), quotas=Quotas(label_values=3))
    pods = [f"p{number}" for number in range(6)]
    booked(ledger, HAND.now_ms, HAND.batch(*quarters(*pods)))
    facts = [
        HAND.fact(1, f"p{number}", name=f"p{number}", namespace="loud", labels={"project": f"v{number}"})
        for number in range(10_000)
    ]
    ledger.observe(Facts(pods=tuple(("prod", fact) for fact in facts)), HAND.now_ms)
    assert held(ledger, PROJECT) == {("v0",): 1, ("v1",): 1, ("v2",): 1, (OTHER_VALUE,): 3}
    assert ledger.cut_labels() == {"values": 9_997}
    booked(ledger, HAND.now_ms, HAND.batch(*quarters("quiet", namespace="quiet", gpu="gpu-2", first=7)))
    seen(ledger, "quiet", 1, namespace="quiet", project="v77")
    assert held(ledger, PROJECT, where={"namespace": ("quiet",)}) == {("v77",): 1}
    ledger.close()
    again = opened(path, exported_labels=("project",), quotas=Quotas(label_values=3))
    seen(again, "p3", 20, namespace="loud", project="another")
    seen(again, "p4", 20, namespace="loud", project="v0")
    assert held(again, PROJECT, where={"pod": ("p3", "p4")}) == {(OTHER_VALUE,): 1, ("v0",): 1}


def test_what_one_node_sends_takes_no_room_of_another_or_of_the_api_server(opened, path):
    settings = {"exported_labels": ("project",), "quotas": Quotas(label_values=3)}
    ledger = opened(fresh(path), **settings)

    def sent(node: str, first: int, *pods: tuple[str, str]) -> None:
        facts = [
            HAND.fact(first + at, pod, node=node, labels={"project": value}) for at, (pod, value) in enumerate(pods)
        ]
        booked(ledger, HAND.now_ms, HAND.batch(*facts, node=node, epoch=f"0192-{node}"))

    def project(pod: str) -> list[tuple[str, ...]]:
        return list(held(ledger, PROJECT, where={"pod": (pod,)}))

    booked(ledger, HAND.now_ms, HAND.batch(*quarters("shown", "own", "more", "late", "last", "fourth")))
    sent("n9", 1, *[(f"x{number}", f"v{number}") for number in range(9)])
    assert ledger.cut_labels() == {"values": 6}, "a node's own values are bounded"
    seen(ledger, "shown", 1, project="search")
    sent("n1", 1, ("own", "ads"), ("more", "search"))
    assert (project("shown"), project("own"), project("more")) == ([("search",)], [("ads",)], [("search",)])
    ledger.close()
    ledger = opened(path, **settings)
    seen(ledger, "own", 2, project="ads")
    seen(ledger, "late", 2, project="nlp")
    ledger.close()
    ledger = opened(path, **settings)
    seen(ledger, "last", 2, project="one-too-many")
    sent("n1", 3, ("fourth", "of-a-node"))
    assert project("late") == [("nlp",)]
    assert project("last") == project("fourth") == [(OTHER_VALUE,)], "the API server has shown all the values"


@pytest.mark.parametrize("value", ["__idle__", "__other__", "a\nb", "x" * 200, "-"])
def test_a_text_that_is_no_value_of_a_label_speaks_of_nothing_else(opened, path, value):
    ledger = opened(fresh(path), exported_labels=("project",))
    booked(ledger, HAND.now_ms, HAND.batch(*quarters("a")))
    seen(ledger, "a", 1, project=value)
    assert held(ledger, PROJECT) == {(OTHER_VALUE,): 1}
    assert ledger.cut_labels() == {"invalid": 1}


def test_labels_that_change_all_the_time_are_cut(opened, path):
    ledger = opened(fresh(path), exported_labels=("project",), quotas=Quotas(label_values=50))
    booked(ledger, HAND.now_ms, HAND.batch(*quarters(*(["a"] * 30))))
    for number in range(30):
        seen(ledger, "a", 15 * number, project=f"v{number}")
    assert len(held(ledger, PROJECT)) == 17
    assert ledger.cut_labels() == {"changes": 13}


def test_labels_outlive_the_ledgers_volume(opened, path, tmp_path):
    archive = in_folder(tmp_path / "archive")
    ledger = opened(fresh(path), exported_labels=EXPORTED, archive=archive)
    booked(ledger, HAND.now_ms, HAND.batch(*quarters("a", "a", "a", "a", "b", None, "unseen")))
    seen(ledger, "a", 5, project="vision")
    assert ledger.archive(HAND.now_ms) is not None
    seen(ledger, "a", 31, project="nlp")
    seen(ledger, "b", 31, cost_center="12")
    assert ledger.archive(HAND.now_ms) is not None
    before = held(ledger, PROJECT, CENTRE)
    restored = opened(fresh(tmp_path / "new" / "ledger.duckdb"), exported_labels=EXPORTED, archive=archive)
    assert held(restored, PROJECT, CENTRE) == before
    assert before["nlp", UNASSIGNED] == 1


def test_each_label_of_a_part_is_restored_as_it_counted(opened, path, tmp_path):
    archive = in_folder(tmp_path / "archive")
    ledger = opened(fresh(path), exported_labels=EXPORTED, archive=archive)
    booked(ledger, HAND.now_ms, HAND.batch(*quarters(*["a"] * 8)))
    seen(ledger, "a", 5, project="vision")
    assert ledger.archive(HAND.now_ms) is not None
    seen(ledger, "a", 16, project="nlp")
    seen(ledger, "a", 31, project="search")
    seen(ledger, "a", 61, project="search")
    seen(ledger, "a", 76, project="ads")
    sent = HAND.fact(9, "a", observed_ms=START_MS + 77 * MINUTE, labels={"project": "by-agent"})
    booked(ledger, HAND.now_ms, HAND.batch(sent))
    assert ledger.archive(HAND.now_ms) is not None
    before = held(ledger, PROJECT)
    assert before == {("vision",): 2, ("nlp",): 1, ("search",): 3, ("by-agent",): 2}
    restored = opened(fresh(tmp_path / "new" / "ledger.duckdb"), exported_labels=EXPORTED, archive=archive)
    assert held(restored, PROJECT) == before


def test_of_labels_dated_in_the_future_the_last_ones_count_from_the_next_quarter_hour(opened, path):
    ledger = opened(fresh(path), exported_labels=EXPORTED)
    seen(ledger, "a", 5, project="vision")
    for minute, value in ((400, "nlp"), (450, "search"), (500, "ads")):
        seen(ledger, "a", minute, project=value)
    seen(ledger, "b", 400, project="nlp")
    seen(ledger, "b", 450, project="vision")
    ledger.redate(START_MS + 31 * MINUTE, "ann", "the clock was ahead")
    booked(ledger, HAND.now_ms, HAND.batch(*quarters("a", "a", "a", "a", "a", "b")))
    assert held(ledger, PROJECT) == {("vision",): 4, ("ads",): 2}
    booked(ledger, HAND.now_ms, HAND.batch(*quarters("b", "b", "b", first=7, gpu="gpu-2")))
    assert held(ledger, PROJECT, where={"pod": ("b",)}) == {("nlp",): 3, ("vision",): 1}


@given(
    changes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 150), st.sampled_from(["", "x", "y"]), st.booleans()), max_size=12
    ),
    rows=st.lists(st.sampled_from([None, *"012345"]), min_size=1, max_size=10),
)
@settings(max_examples=examples(4, 60))
def test_sums_over_a_label_are_the_total_and_a_filter_selects_its_rows(tmp_path_factory, changes, rows):
    place = fresh(tmp_path_factory.mktemp("ledger") / "ledger.duckdb")
    ledger = DuckLedger(place, VirtualClock(HAND.now_ms), exported_labels=EXPORTED)
    try:
        sent = quarters(*rows)
        by_agents = [change for change in changes if change[3]]
        facts = [
            HAND.fact(len(sent) + 1 + at, str(pod), observed_ms=START_MS + minute * MINUTE, labels={"project": value})
            for at, (pod, minute, value, _) in enumerate(by_agents)
        ]
        booked(ledger, HAND.now_ms, HAND.batch(*sent, *facts))
        for pod, minute, value, by_agent in sorted(changes, key=lambda change: change[1]):
            if not by_agent:
                seen(ledger, str(pod), minute, **({"project": value} if value else {}), cost_center=str(pod % 2))
        total = held(ledger)
        fine = held(ledger, "team", PROJECT, CENTRE, "pod")
        assert sum(fine.values()) == total.get((), 0) == len(rows)
        for by in ((PROJECT,), (CENTRE, "team"), ("pod", PROJECT)):
            coarse: Counter[tuple[str, ...]] = Counter()
            for key, count in fine.items():
                coarse[tuple(dict(zip(("team", PROJECT, CENTRE, "pod"), key, strict=True))[name] for name in by)] += (
                    count
                )
            assert held(ledger, *by) == coarse
        for value in {key[1] for key in fine}:
            assert held(ledger, "pod", PROJECT, where={PROJECT: (value,)}) == {
                key: count for key, count in held(ledger, "pod", PROJECT).items() if key[1] == value
            }
    finally:
        ledger.close()
