"""Elects one leader of several replicas through a Lease.

This module adds three rules to the election of the Kubernetes client:

- A replica that could not renew the Lease for `renew_s` does not lead, even while a request hangs. `leading` therefore
  reads the clock.
- If the API server is unavailable, the leader's term ends, and the election goes on.
- A replica that stops releases the Lease, so that the next leader does not wait until it expires."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio import client, config
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from gputally.base.background_tasks import BackgroundTask, error_summary
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.api_client import in_cluster

# The library logs every failed renewal with a traceback. `leading` and the metrics already show such a failure.
_library = logging.getLogger("kubernetes.aio.leaderelection")
_library.addHandler(logging.NullHandler())
_library.propagate = False


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Durations of the election in whole seconds, as in client-go.

    lease_s: how long a Lease is valid.
    renew_s: how long the leader tries to renew it before its term ends.
    retry_s: the pause between two attempts."""

    lease_s: int = 15
    renew_s: int = 10
    retry_s: int = 2


class Election:
    """The part of one replica in the election. `run` needs a thread of its own. Any thread may call `leading`."""

    def __init__(
        self,
        name: str,
        namespace: str,
        identity: str,
        clock: Clock,
        *,
        kubeconfig: Path | None = None,
        times: LeaseTimes = LeaseTimes(),
    ) -> None:
        """Create the election for the Lease `namespace/name`.

        identity: the name of this replica in the Lease.
        kubeconfig: see `gputally.kubernetes.api_client.KubernetesApi.connect`."""
        self._name, self._namespace, self._identity = name, namespace, identity
        self._clock = clock
        self._kubeconfig = kubeconfig
        self._times = times
        self._elected = False
        self._renewed_ms: int | None = None
        self._fault = ""
        self._task: BackgroundTask | None = None

    @property
    def fault(self) -> str:
        """The error that ended or prevented the last term; "" once the Lease has been renewed again."""
        return self._fault

    def leading(self) -> bool:
        """Return True while this replica may act as the leader."""
        renewed = self._renewed_ms
        if not self._elected or renewed is None:
            return False
        return self._clock.monotonic_ms() - renewed < self._times.renew_s * MS_PER_SECOND

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Take part in the election until `stop` is set, then release the Lease.

        task: records each request to the API server as progress, so that it has a fault if the election hangs."""
        self._task = task
        asyncio.run(self._run(stop))

    async def _run(self, stop: threading.Event) -> None:
        settings = client.Configuration()
        if self._kubeconfig is None and in_cluster():
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            path = str(self._kubeconfig) if self._kubeconfig else None
            await config.load_kube_config(config_file=path, client_configuration=settings)  # type: ignore[no-untyped-call]
        async with client.ApiClient(settings) as api:
            lock = _Lock(self._name, self._namespace, self._identity, api, self, self._times.renew_s)
            stopped = asyncio.ensure_future(asyncio.to_thread(stop.wait))
            while not stopped.done():
                term = asyncio.ensure_future(self._run_term(lock))
                await asyncio.wait({stopped, term}, return_when=asyncio.FIRST_COMPLETED)
                was_elected, self._elected = self._elected, False
                term.cancel()
                # Wait only for a limited time: a request that does not end is abandoned with its thread.
                await asyncio.wait({term}, timeout=self._times.retry_s)
                error = term.exception() if term.done() and not term.cancelled() else None
                self._fault = error_summary(error) if isinstance(error, Exception) else ""
                if stopped.done():
                    if was_elected:
                        with contextlib.suppress(Exception):
                            async with asyncio.timeout(self._times.retry_s):
                                await lock.release()
                else:
                    await asyncio.wait({stopped}, timeout=self._times.retry_s)

    async def _run_term(self, lock: _Lock) -> None:
        """Wait until this replica is elected, then lead until it loses the Lease."""
        lease_lost = asyncio.Event()

        async def lead() -> None:
            self._elected = True
            try:
                await lease_lost.wait()
            finally:
                self._elected = False

        async def lose() -> None:
            lease_lost.set()

        times = self._times
        await LeaderElection(Config(lock, times.lease_s, times.renew_s, times.retry_s, lead, lose)).run()

    def request_begins(self) -> int:
        """Record that a request to the API server begins. Return the monotonic time in milliseconds."""
        if self._task is not None:
            self._task.progress()
        return self._clock.monotonic_ms()

    def lease_renewed(self, at_ms: int) -> None:
        """Record that the Lease was renewed. at_ms: the monotonic time at which the request began."""
        self._renewed_ms, self._fault = at_ms, ""


class _Lock(LeaseLock):
    """The Lease of an election. Its requests have a time limit, and it reports requests and renewals to the
    election."""

    def __init__(
        self,
        name: str,
        namespace: str,
        identity: str,
        api: client.ApiClient,
        election: Election,
        timeout_s: float,
    ) -> None:
        super().__init__(name, namespace, identity, api)
        self._election = election
        self._timeout_s = timeout_s

    async def get(self, name: str, namespace: str) -> Any:
        self._election.request_begins()
        async with asyncio.timeout(self._timeout_s):  # `wait_for` of Python 3.11 can swallow a cancellation
            return await super().get(name, namespace)

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        began_ms = self._election.request_begins()
        # Replaces the library's code: release 37 passes an argument that its own validation refuses.
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.api_instance.create_namespaced_lease(namespace, lease)
        except client.ApiException:
            return False
        self._election.lease_renewed(began_ms)
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        began_ms = self._election.request_begins()
        async with asyncio.timeout(self._timeout_s):
            renewed = await super().update(name, namespace, updated_record)
        if renewed:
            self._election.lease_renewed(began_ms)
        return renewed

    async def release(self) -> None:
        """Release the Lease if this replica holds it. As in client-go, it then has no holder and is valid for one
        second."""
        lease = await self.api_instance.read_namespaced_lease(self.name, self.namespace)
        if lease.spec is not None and lease.spec.holder_identity == self.identity:
            lease.spec.holder_identity = None
            lease.spec.lease_duration_seconds = 1
            await self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease)
