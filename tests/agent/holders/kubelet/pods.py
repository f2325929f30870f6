"""Pods as the API server writes them, a store that a test can wait for, and a reflector on a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from agent.holders.kubelet.kubernetes_api_objects import PodView, read
from agent.holders.kubelet.lean_list_watch import LeanReflector, PodStore
from agent.wire import PodFacts
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock, SystemClock
from tests.agent.sample_values import UID


def pod_object(
    namespace: str = "vision",
    name: str = "train-0",
    uid: str = UID,
    phase: str = "Running",
    gpus: int = 1,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Build a Pod. more: members of `metadata` (owners, deletionTimestamp), or `spec` and `status`, to merge in."""
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    spec = {
        "nodeName": "node-1",
        "schedulerName": "fake-scheduler",
        "priority": 100,
        "containers": [{"name": "main", "image": "i", "resources": {"limits": limits, "requests": limits}}],
        **more.pop("spec", {}),
    }
    status = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-10-01T08:00:01Z"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-10-01T08:00:09Z"},
        ],
        "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": "2026-10-01T08:00:05Z"}}}],
        **more.pop("status", {}),
    }
    meta = {
        "namespace": namespace,
        "name": name,
        "uid": uid,
        "labels": labels or {},
        "annotations": annotations or {},
        "creationTimestamp": "2026-10-01T08:00:00Z",
        "resourceVersion": "7",
        **more,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}


def view(*allowed: str, **pod: Any) -> PodView:
    return read(json.dumps(pod_object(**pod)).encode(), "node-1", allowed)


def facts(**pod: Any) -> PodFacts:
    return view(**pod).facts


class Seen(PodStore):
    """A pod store that notifies a waiting test of each change."""

    def __init__(self, clock: Clock, *labels: str) -> None:
        super().__init__("node-1", labels, clock)
        self.changed = threading.Condition()

    def replace(self, items: Sequence[bytes]) -> None:
        with self.changed:
            super().replace(items)
            self.changed.notify_all()

    def apply(self, change: str, item: bytes) -> None:
        with self.changed:
            super().apply(change, item)
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 10), sorted(self.views())

    def names(self) -> set[str]:
        return {name for _, name in self.views()}


class Following:
    """Runs a reflector on a thread of its own."""

    def __init__(self, reflector: LeanReflector) -> None:
        self.reflector = reflector
        self._stop = threading.Event()
        self.errors = list[Exception]()
        self._thread = BackgroundTasks(SystemClock()).start("watch", reflector.run, self._stop, self.errors.append)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        assert not self.errors
