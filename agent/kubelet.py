"""What the kubelet says its pods were given, asked every few seconds on a thread of its own.

A kubelet that is slow, restarting or rate limiting must never hold up the sampling: readers see the last
answer with its age. Devices stay with running containers while a kubelet restarts, so an answer counts for
half a minute after it could not be renewed; then nobody knows any more who holds what.
It must not know what a device is called elsewhere or which pods are still alive.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from agent.clock import Clock
from agent.kube import podresources
from agent.kube.grpc_unary import RESOURCE_EXHAUSTED, RpcFailed, RpcUnavailable, UnaryChannel
from agent.kube.podresources import Devices, Malformed, PodResources
from agent.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.kubelet")

POLL_MS = 5 * MS_PER_SECOND
"""Source: the kubelet answers 100 calls a second to all its clients together, burst 10."""
MAX_BACKOFF_MS = MS_PER_MINUTE
VALID_MS = 30 * MS_PER_SECOND
OFFER_MS = MS_PER_MINUTE
"""How often it is asked what it could give away, which changes with the device plugin only."""


class Channel(Protocol):
    """A way to call the kubelet: `agent.kube.grpc_unary.UnaryChannel`."""

    def call(self, method: str, message: bytes = b"") -> bytes: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Given:
    """The last answer. pods: who was given what. offered: the devices that can be given, empty where an old
    kubelet does not say. at_ms: monotonic time of the answer, None before the first. failure: why the
    latest attempt brought none ("" = it did)."""

    pods: tuple[PodResources, ...] = ()
    offered: tuple[Devices, ...] = ()
    at_ms: int | None = None
    failure: str = "not asked yet"
    took_ms: int = 0


class Kubelet:
    """Polls the kubelet at `socket`; `run` is its thread, `poll` one step of it."""

    def __init__(self, socket: Path, clock: Clock, channel: Channel | None = None) -> None:
        self._channel: Channel = channel or UnaryChannel(socket, clock)
        self._clock = clock
        self._given = Given()
        self._failures = 0
        self._offer_due_ms = 0
        self._wake = threading.Event()

    def given(self) -> Given:
        """The last answer; from any thread."""
        return self._given

    def unknown_for(self) -> str:
        """Why it is not known who holds what; "" while an answer is recent enough."""
        given = self._given
        if given.at_ms is not None and self._clock.monotonic_ms() - given.at_ms <= VALID_MS:
            return ""
        return f"kubelet: {given.failure}" if given.failure else "kubelet: no recent answer"

    def ask_soon(self) -> None:
        """Something changed: do not wait for the next turn. From any thread."""
        self._wake.set()

    def poll(self) -> Given:
        """Ask once; a failure keeps the earlier answer beside its reason."""
        now_ms = self._clock.monotonic_ms()
        try:
            pods = podresources.decode_list(self._channel.call(podresources.SERVICE + "List"))
            offered = self._given.offered
            if now_ms >= self._offer_due_ms:
                offered = self._ask_offered()
                self._offer_due_ms = now_ms + OFFER_MS
        except (RpcUnavailable, RpcFailed, Malformed) as error:
            self._failed(error)
        else:
            if self._failures:
                log.info("the kubelet answers", extra={"pods": len(pods)})
            self._failures = 0
            self._given = Given(pods, offered, now_ms, "", self._clock.monotonic_ms() - now_ms)
        return self._given

    def run(self, stop: threading.Event) -> None:
        """Poll until `stop` is set; `close` wakes it."""
        while not stop.is_set():
            self._wake.clear()
            self.poll()
            self._clock.wait(self._pause_ms() / MS_PER_SECOND, self._wake)
        self._channel.close()

    def close(self) -> None:
        """Let `run` look at its `stop`."""
        self._wake.set()

    def _pause_ms(self) -> int:
        return min(POLL_MS << min(self._failures, 8), MAX_BACKOFF_MS) if self._failures > 3 else POLL_MS

    def _ask_offered(self) -> tuple[Devices, ...]:
        """Kubelets before 1.23 do not know the call: then it is not known how many parts a device has."""
        try:
            return podresources.decode_allocatable(self._channel.call(podresources.SERVICE + "GetAllocatableResources"))
        except RpcFailed as error:
            if error.code == RESOURCE_EXHAUSTED:
                raise
            return ()

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("the kubelet does not say who holds what", extra={"reason": str(error)})
        self._given = replace(self._given, failure=str(error))
