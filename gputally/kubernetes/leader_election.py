"""Elects one leader of several replicas through a Lease.

This module adds three rules to the client's election. A replica that could not renew for `renew_s` does not lead, even
while a request hangs (`leading` depends on the clock, not on the election's steps). If the server is unavailable, the
term ends, not the election. A replica that stops releases the Lease, so that the next one need not wait until it
expires."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio import client, config
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.api_client import in_cluster

# The library logs every failed renewal with a traceback; `leading` and the metrics show the same.
_library = logging.getLogger("kubernetes.aio.leaderelection")
_library.addHandler(logging.NullHandler())
_library.propagate = False


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Durations in whole seconds, as in client-go: how long a Lease lasts, how long its holder tries to renew, how
    often."""

    lease_s: int = 15
    renew_s: int = 10
    retry_s: int = 2


class Election:
    """The election of this replica. Run it in a thread; any thread may call `leading`."""

    def __init__(
        self,
        name: str,
        namespace: str,
        identity: str,
        clock: Clock,
        *,
        kubeconfig: Path | None = None,
        terms: LeaseTimes = LeaseTimes(),
    ) -> None:
        self._name, self._namespace, self._identity = name, namespace, identity
        self._clock = clock
        self._kubeconfig = kubeconfig
        self._terms = terms
        self._elected = False
        self._renewed_ms: int | None = None
        self._fault = ""
        self._task: BackgroundTask | None = None

    @property
    def fault(self) -> str:
        """Return what ended the last term or prevented it; empty once the Lease has been renewed since."""
        return self._fault

    def leading(self) -> bool:
        """Return whether this replica may act now."""
        renewed = self._renewed_ms
        if not self._elected or renewed is None:
            return False
        return self._clock.monotonic_ms() - renewed < self._terms.renew_s * MS_PER_SECOND

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Take part in the election until `stop` is set, then release the Lease. task: told about each request to the
        API server, so that a supervisor can see that the election is not stuck."""
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
            lock = _Lock(self._name, self._namespace, self._identity, api, self._renewed, self._terms.renew_s)
            stopped = asyncio.ensure_future(asyncio.to_thread(stop.wait))
            while not stopped.done():
                term = asyncio.ensure_future(self._stand(lock))
                await asyncio.wait({stopped, term}, return_when=asyncio.FIRST_COMPLETED)
                held, self._elected = self._elected, False
                term.cancel()
                # Wait only for a limited time: a request that does not end is abandoned with its thread.
                await asyncio.wait({term}, timeout=self._terms.retry_s)
                ended = term.exception() if term.done() and not term.cancelled() else None
                # Whatever the reason, the election is tried again.
                self._fault = f"{type(ended).__name__}: {ended}".splitlines()[0] if isinstance(ended, Exception) else ""
                if stopped.done():
                    if held:
                        with contextlib.suppress(Exception):
                            async with asyncio.timeout(self._terms.retry_s):
                                await lock.give_back()
                else:
                    await asyncio.wait({stopped}, timeout=self._terms.retry_s)

    async def _stand(self, lock: _Lock) -> None:
        """Wait until elected, then lead until the Lease is lost."""
        over = asyncio.Event()

        async def lead() -> None:
            self._elected = True
            try:
                await over.wait()
            finally:
                self._elected = False

        async def lost() -> None:
            over.set()

        terms = self._terms
        await LeaderElection(Config(lock, terms.lease_s, terms.renew_s, terms.retry_s, lead, lost)).run()

    def _renewed(self, at_ms: int | None) -> int:
        """Return the time of the last renewal; with an argument, record it first."""
        if self._task is not None:
            self._task.progress()
        if at_ms is not None:
            self._renewed_ms, self._fault = at_ms, ""
        return self._clock.monotonic_ms()


class _Lock(LeaseLock):
    """A Lease whose requests have a time limit, and which records the time before its last successful renewal."""

    def __init__(
        self,
        name: str,
        namespace: str,
        identity: str,
        api: client.ApiClient,
        renewed: Callable[[int | None], int],
        patience_s: float,
    ) -> None:
        super().__init__(name, namespace, identity, api)
        self._tell = renewed
        self._patience_s = patience_s

    async def get(self, name: str, namespace: str) -> Any:
        self._tell(None)
        async with asyncio.timeout(self._patience_s):  # `wait_for` of Python 3.11 can swallow a cancellation
            return await super().get(name, namespace)

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        asked_ms = self._tell(None)
        # Replaces the library's code: release 37 passes an argument that its own validation refuses.
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            async with asyncio.timeout(self._patience_s):
                await self.api_instance.create_namespaced_lease(namespace, lease)
        except client.ApiException:
            return False
        return self._told(True, asked_ms)

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        asked_ms = self._tell(None)
        async with asyncio.timeout(self._patience_s):
            made = await super().update(name, namespace, updated_record)
        return self._told(made, asked_ms)

    async def give_back(self) -> None:
        """Release the lease as client-go does on a clean stop: without a holder, for one second."""
        lease = await self.api_instance.read_namespaced_lease(self.name, self.namespace)
        if lease.spec is not None and lease.spec.holder_identity == self.identity:
            lease.spec.holder_identity = None
            lease.spec.lease_duration_seconds = 1
            await self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease)

    def _told(self, made: bool, asked_ms: int) -> bool:
        if made:
            self._tell(asked_ms)
        return made
