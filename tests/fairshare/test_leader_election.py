"""Of several replicas at most one leads, whatever the API server answers, and one leads again soon afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterError, ClusterRefused, ClusterUnavailable, Conflict
from gputally.kubernetes.leader_election import Election, LeaseTimes, Term
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import LEASE, Object

TIMES = LeaseTimes()
FAULTS: dict[str, ClusterError] = {
    "409": Conflict("409"), "429": ClusterUnavailable("429"), "500": ClusterUnavailable("500"), "403":
    ClusterRefused("403"),
}  # fmt: skip


class Flaky:
    """A replica's client. `faults` are the results of its next requests, first "" for none: a status, `lost` (the
    server does not get the request), `unheard` (the server executes the request, and the client gets no answer), and
    `hangs` (neither, after the time limit)."""

    def __init__(self, cluster: MemoryCluster, clock: VirtualClock) -> None:
        self.cluster = cluster
        self.clock = clock
        self.faults: list[str] = []
        self.asked = 0

    def _call(self, request: Callable[[], Object]) -> Object:
        self.asked += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "hangs":
            self.clock.advance(round(TIMES.request_s * 1000))
        if fault in ("lost", "hangs"):
            raise ClusterUnavailable(fault)
        if fault in FAULTS:
            raise FAULTS[fault]
        answer = request()
        if fault == "unheard":
            raise ClusterUnavailable(fault)
        return answer

    def get(self, *of: Any) -> Object:
        return self._call(lambda: self.cluster.get(*of))

    def create(self, *of: Any, **more: Any) -> Object:
        return self._call(lambda: self.cluster.create(*of, **more))

    def patch(self, *of: Any, **more: Any) -> Object:
        return self._call(lambda: self.cluster.patch(*of, **more))


class Replica:
    def __init__(self, name: str, cluster: MemoryCluster, clock: VirtualClock) -> None:
        self.client: Any = Flaky(cluster, clock)
        self.election = Election("lease", "ns", name, clock, lambda _: self.client)

    def attempt(self, *faults: str) -> Term | None:
        self.client.faults = list(faults)
        self.election.attempt(self.client)
        return self.election.term()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_790_812_800_000)


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster([LEASE])


@pytest.fixture
def replicas(cluster: MemoryCluster, clock: VirtualClock) -> tuple[Replica, Replica]:
    return Replica("one", cluster, clock), Replica("two", cluster, clock)


FAULTS_OF_AN_ATTEMPT = st.lists(
    st.sampled_from(["", "409", "429", "500", "403", "lost", "unheard", "hangs"]), max_size=2
)


@given(st.lists(st.tuples(FAULTS_OF_AN_ATTEMPT, FAULTS_OF_AN_ATTEMPT, st.integers(0, 8)), max_size=25))
def test_at_most_one_leads_and_one_leads_within_the_lease(steps: list[tuple[list[str], list[str], int]]) -> None:
    clock, cluster = VirtualClock(0), MemoryCluster([LEASE])
    both = Replica("one", cluster, clock), Replica("two", cluster, clock)
    ended: set[Term] = set()
    present: Term | None = None

    def leaders() -> list[Term]:
        nonlocal present
        terms = [term for replica in both if (term := replica.election.term()) is not None]
        assert len(terms) <= 1
        assert not ended.intersection(terms), "a term that has ended begins again"
        now = terms[0] if terms else None
        if present is not None and present != now:
            ended.add(present)
        present = now
        return terms

    for faults_of_one, faults_of_two, pause_s in steps:
        for replica, faults in zip(both, (faults_of_one, faults_of_two), strict=True):
            replica.attempt(*faults)
            leaders()
        clock.advance(pause_s * 1000)
        leaders()
    for _ in range(TIMES.lease_s // TIMES.retry_s + 2):
        for replica in both:
            replica.attempt()
            leaders()
        clock.advance(TIMES.retry_s * 1000)
    assert leaders()
    assert {replica.election.leaderless() for replica in both} == {None}


@pytest.mark.parametrize("fault", ["409", "429", "500", "lost", "unheard", "hangs"])
@pytest.mark.parametrize("request_", [0, 1])
def test_one_failed_request_ends_no_term(replicas: tuple[Replica, Replica], fault: str, request_: int) -> None:
    one, _ = replicas
    term = one.attempt()
    assert term is not None
    assert one.attempt(*[""] * request_, fault) == term
    assert one.election.fault
    assert one.attempt() == term
    assert one.election.fault == ""


def test_who_cannot_renew_does_not_lead_and_its_next_term_is_another(
    replicas: tuple[Replica, Replica], clock: VirtualClock
) -> None:
    one, two = replicas
    first = one.attempt()
    clock.advance(TIMES.renew_s * 1000)
    assert one.election.term() is None
    assert two.attempt() is None, "the Lease is valid longer than its holder leads"
    again = one.attempt()
    assert again is not None
    assert again != first


def test_a_leader_that_sees_another_holder_ends_at_once(
    replicas: tuple[Replica, Replica], cluster: MemoryCluster
) -> None:
    one, _ = replicas
    assert one.attempt()
    cluster.patch(LEASE, "lease", "ns", {"spec": {"holderIdentity": "somebody"}}, field_manager="kubectl")
    assert one.attempt() is None
    assert one.election.leaderless() is None


def test_a_step_of_the_wall_clock_changes_no_leader(replicas: tuple[Replica, Replica], clock: VirtualClock) -> None:
    one, two = replicas
    term = one.attempt()
    assert two.attempt() is None
    clock.step_wall(3_600_000)
    assert two.attempt() is None
    assert one.attempt() == term


def test_a_replica_that_stops_hands_over_at_once(replicas: tuple[Replica, Replica], clock: VirtualClock) -> None:
    one, two = replicas
    stop = threading.Event()

    class Stopping(BackgroundTask):
        """Stops the election after its second attempt."""

        turns = 0

        def progress(self) -> None:
            self.turns += 1
            if self.turns == 3:
                stop.set()
            super().progress()

    one.election.run(stop, Stopping("lease", clock))
    assert one.election.term() is None
    assert two.attempt() is not None


def test_it_says_that_nobody_leads(replicas: tuple[Replica, Replica], clock: VirtualClock) -> None:
    one, two = replicas
    assert one.election.leaderless() is not None, "nothing is known yet"
    one.attempt()
    two.attempt()
    assert two.election.leaderless() is None
    clock.advance(TIMES.lease_s * 1000)
    assert "429" in (two.attempt("429"), two.election.leaderless() or "")[1]
    assert one.election.leaderless() is not None
