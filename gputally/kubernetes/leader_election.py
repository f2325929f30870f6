"""Elects one leader of several replicas through a Lease, by the rules of client-go.

A replica that holds the Lease leads for a *term*, which is a value: it is never changed, and a later term of the same
replica differs from it. Work that began in one term compares the terms and cannot act in another one. One thread asks,
takes and renews; everything that other threads read is replaced at once (`_State`).

- A replica that could not renew the Lease for `renew_s` does not lead, even while a request hangs. `term` therefore
  reads the clock.
- A failed request ends no term by itself. The Lease of another holder does, at once.
- Only the monotonic clock decides. The times in the Lease are for people.
- A replica that stops releases the Lease, so that the next leader does not wait until it expires.

Source: client-go, tools/leaderelection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.base.errors import ClusterError, Conflict, NotFound
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.objects import LEASE, Cluster, Object, micro_time

_FIELD_MANAGER: Final = "gputally-leader-election"


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Durations of the election in whole seconds, as in client-go.

    lease_s: how long a Lease is valid after its last change.
    renew_s: how long the leader tries to renew it before its term ends.
    retry_s: the pause between two attempts."""

    lease_s: int = 15
    renew_s: int = 10
    retry_s: int = 2

    @property
    def request_s(self) -> float:
        """The time limit of one request, so that a leader whose request hangs can try a second time."""
        return self.renew_s / 2


@dataclass(frozen=True, slots=True)
class Term:
    """One term of one replica. number: counts the replica's terms from 1."""

    identity: str
    number: int


@dataclass(frozen=True, slots=True)
class _State:
    """What a replica knows about the Lease. Times are monotonic, in milliseconds.

    term, renewed_ms: this replica's last term, and the time at which the request of its last renewal began.
    holder, version, changed_ms: the holder and the version of the Lease, and when this replica first saw the version.
    fault: why the last attempt failed."""

    term: Term
    renewed_ms: int | None = None
    holder: str = ""
    version: str = ""
    changed_ms: int = 0
    fault: str = ""


class Election:
    """The part of one replica in the election. `run` needs a thread of its own, and only one thread may call `attempt`.
    Any thread may read."""

    def __init__(
        self,
        name: str,
        namespace: str,
        identity: str,
        clock: Clock,
        connect: Callable[[LeaseTimes], Cluster],
        times: LeaseTimes = LeaseTimes(),
    ) -> None:
        """Create the election for the Lease `namespace/name`.

        identity: the name of this replica in the Lease.
        connect: returns the API server that has the Lease. Its requests take at most `LeaseTimes.request_s`. Raises
            ClusterError."""
        self._name, self._namespace, self._identity = name, namespace, identity
        self._clock = clock
        self._connect = connect
        self._times = times
        self._state = _State(Term(identity, 0))

    @property
    def fault(self) -> str:
        """Why the last attempt failed; "" if it succeeded or another replica leads."""
        return self._state.fault

    def term(self) -> Term | None:
        """Return the present term of this replica; None while it does not lead."""
        state = self._state
        return state.term if self._renewed(state) else None

    def leaderless(self) -> str | None:
        """Return the reason if no replica is known to lead; None while one leads."""
        state, now = self._state, self._clock.monotonic_ms()
        other_leads = state.holder not in ("", self._identity) and now < state.changed_ms + self._lease_ms
        if self._renewed(state) or other_leads:
            return None
        return f"no replica leads: {state.fault or f'the Lease {self._namespace}/{self._name} is free'}"

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Take part in the election until `stop` is set, then release the Lease. Raises ClusterError without access to
        a cluster.

        task: records each attempt as progress, so that it has a fault if the election hangs."""
        cluster = self._connect(self._times)
        while not stop.is_set():
            task.progress()
            self.attempt(cluster)
            self._clock.wait(self._times.retry_s, stop)
        if self.term() is not None:
            self._release(cluster)

    def attempt(self, cluster: Cluster) -> None:
        """Take the Lease if it is free or expired, or renew it, once."""
        try:
            self._take(cluster)
        except ClusterError as error:
            self._state = replace(self._state, fault=str(error))

    @property
    def _lease_ms(self) -> int:
        return self._times.lease_s * MS_PER_SECOND

    def _renewed(self, state: _State) -> bool:
        renewed = state.renewed_ms
        return renewed is not None and self._clock.monotonic_ms() < renewed + self._times.renew_s * MS_PER_SECOND

    def _take(self, cluster: Cluster) -> None:
        try:
            lease = cluster.get(LEASE, self._name, self._namespace)
        except NotFound:
            began_ms = self._clock.monotonic_ms()
            spec = self._spec({}, renewal=False)
            self._won(cluster.create(self._object(spec), field_manager=_FIELD_MANAGER), began_ms)
            return
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        self._see(lease, holder)
        if holder not in ("", self._identity):
            self._state = replace(self._state, renewed_ms=None, fault="")
            if self._clock.monotonic_ms() < self._state.changed_ms + self._lease_ms:
                return
        began_ms = self._clock.monotonic_ms()
        try:
            self._won(self._patch(cluster, self._spec(spec, renewal=holder == self._identity)), began_ms)
        except Conflict:
            self._state = replace(self._state, fault="another replica changed the Lease at the same time")

    def _see(self, lease: Object, holder: str) -> None:
        version = str(lease["metadata"].get("resourceVersion"))
        if version != self._state.version:
            now = self._clock.monotonic_ms()
            self._state = replace(self._state, holder=holder, version=version, changed_ms=now)

    def _won(self, lease: Object, began_ms: int) -> None:
        """Begin a term, or extend the present one if it has not ended meanwhile. began_ms: when the request began."""
        state = self._state
        term = state.term if self._renewed(state) else Term(self._identity, state.term.number + 1)
        self._see(lease, self._identity)
        self._state = replace(self._state, term=term, renewed_ms=began_ms, fault="")

    def _release(self, cluster: Cluster) -> None:
        """Release the Lease. As in client-go, it then has no holder and is valid for one second."""
        self._state = replace(self._state, renewed_ms=None)
        with contextlib.suppress(ClusterError):
            self._patch(cluster, {"holderIdentity": "", "leaseDurationSeconds": 1})

    def _patch(self, cluster: Cluster, spec: Object) -> Object:
        """Change the Lease if it still has the version that this replica saw last. Raises Conflict."""
        change = {"metadata": {"resourceVersion": self._state.version}, "spec": spec}
        return cluster.patch(LEASE, self._name, self._namespace, change, field_manager=_FIELD_MANAGER)

    def _object(self, spec: Object) -> Object:
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": spec,
        }

    def _spec(self, present: Object, *, renewal: bool) -> dict[str, Any]:
        """Return the Lease's fields with this replica as the holder. renewal: whether it is the holder already."""
        now = micro_time(self._clock.wall_ms())
        spec = {"holderIdentity": self._identity, "leaseDurationSeconds": self._times.lease_s, "renewTime": now}
        if renewal:
            return spec
        return {**spec, "acquireTime": now, "leaseTransitions": int(present.get("leaseTransitions") or 0) + 1}
