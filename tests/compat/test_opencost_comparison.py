"""OpenCost's rule on hand-written answers, and the compared day, which is complete and exact in the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from accountant.storage.duckdb_ledger import DuckLedger
from gputally.base.units import MS_PER_MINUTE
from tests.compat import opencost_day as day
from tests.compat.opencost_metered import answer, metered
from tests.compat.opencost_rule import Asked, by_namespace

HOUR = Asked(0, 3_600)


def looks(*times: int) -> list[tuple[float, str]]:
    return [(float(at), "1") for at in times]


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [
        (looks(0, 300, 600, 3_600), 3_600),
        (looks(300, 900), 600),  # what lies between is not asked for
        (looks(900), 300),  # half a resolution on both sides
        (looks(0), 150),  # of which none lies before the window
        (looks(3_600), 150),
        (looks(-300, 300), 300),
        (looks(600, 300), 300),
    ],
)
def test_a_pod_lasts_from_the_first_look_to_the_last(seen: list[tuple[float, str]], seconds: float) -> None:
    assert HOUR.seconds(seen) == seconds


def test_hours_are_requested_gpus_times_that() -> None:
    def about(namespace: str, pod: str, **more: str) -> dict[str, str]:
        return {"namespace": namespace, "pod": pod, "uid": f"uid-{pod}", **more}

    running = [
        {"metric": about("a", "two"), "values": looks(0, 1_800)},
        {"metric": about("a", "slice"), "values": looks(0, 3_600)},
        {"metric": about("b", "one"), "values": looks(600, 2_400)},
    ]
    requested = [
        {"metric": about("a", "two", container="main"), "value": (3_600, "2")},
        {"metric": about("a", "two", container="side"), "value": (3_600, "1")},
        {"metric": about("b", "one", container="main"), "value": (3_600, "1")},
        {"metric": about("b", "unseen", container="main"), "value": (3_600, "8")},
    ]
    hours = HOUR.gpu_hours(running, requested)
    assert hours == {("a", "two", "uid-two"): 1.5, ("b", "one", "uid-one"): 0.5}
    assert by_namespace(hours) == {"a": 1.5, "b": 0.5}


def test_no_part_of_a_gpu_is_held_twice() -> None:
    """Otherwise the day would have no true figures."""
    held: dict[tuple[str, int, int], int] = {}
    counted: dict[tuple[str, int, str], int] = {}
    for pod in sorted(day.pods(), key=lambda each: each.start_s):
        for gpu in pod.gpus:
            if pod.parts == 1:
                assert held.get((pod.node, gpu, 0), -day.MARGIN_S) <= pod.start_s
                held[pod.node, gpu, 0] = pod.end_s
            else:
                counted[pod.node, gpu, pod.resource] = counted.get((pod.node, gpu, pod.resource), 0) + 1
                assert counted[pod.node, gpu, pod.resource] <= pod.parts
    truth = day.truth(day.pods())
    assert (truth["steady"], truth["dark"], truth["sliced"], truth["mig"]) == pytest.approx((192, 184, 24, 24))


def test_what_kube_state_metrics_shows_ends_with_a_word_and_lacks_the_outage() -> None:
    pod = day.Pod("ns", "p", "n", (0, 1), day.OUTAGE_S[0] - 90, day.OUTAGE_S[1] + 30)
    lines = day.history((pod,)).splitlines()
    running = [line for line in lines if line.startswith("kube_pod_container_status_running")]
    whole, gapped = ([line for line in running if f'cluster="{name}"' in line] for name in (day.GAPLESS, day.GAPPED))
    stamps = [int(line.rsplit(" ", 1)[1]) for line in whole]
    assert stamps == sorted(stamps)
    assert {later - at for at, later in pairwise(stamps)} == {60}
    assert [line.split(" ")[-2] for line in whole[-10:]] == ["0"] * 10
    assert len(whole) - len(gapped) == 30
    assert sum('resource="nvidia_com_gpu"' in line and " 2 " in line for line in lines) == len(running)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DuckLedger]:
    """A part of the day: shared GPUs, short pods, and the node that loses power."""
    some = [pod for pod in day.pods() if pod.namespace in {"sliced", "mig", "dark", "brief"}]
    found = metered(some, tmp_path_factory.mktemp("metered"), 15 * MS_PER_MINUTE)
    yield found
    found.close()


def test_the_ledger_has_the_days_truth(ledger: DuckLedger) -> None:
    truth, found = day.truth(day.pods()), answer(ledger, "namespace")
    for name in ("sliced", "mig"):
        assert found[name] == pytest.approx(truth[name], rel=1e-9)
    # Of the node that lost its power: the interval that was open, and the first seconds after.
    assert 0 < truth["dark"] - found["dark"] <= 8 * (60 + 5) / 3_600
    # Of a short pod begin and end are each up to five seconds late.
    named = answer(ledger, "namespace,pod")
    for pod in day.pods():
        if pod.namespace == "brief":
            assert named[f"brief/{pod.name}"] == pytest.approx(pod.held_s() / 3_600, abs=5 / 3_600)
