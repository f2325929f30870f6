"""The controller's background tasks: a defect ends neither the cycles nor a thread, and readiness shows it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from fairshare.composition import run_beside
from fairshare.controller.controller_metrics import Metrics
from fairshare.http_server import Health
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.errors import Unavailable
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.objects import POD
from tests.fairshare.builders import cluster_of, policy_of, queue_object
from tests.patience import patience_s

Make = Callable[..., Any]
_INTERRUPTED = """
import signal, threading
from gputally.base.background_tasks import set_on_signals
stop = threading.Event()
set_on_signals(stop)
with stop._cond:  # the main thread is inside the event when the signal arrives
    signal.raise_signal(signal.SIGTERM)
stop.wait()
print("ended")
"""


def _stopped(metrics: Metrics, task: str) -> float | None:
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name == "gputally_task_stopped" and sample.labels == {"task": task}:
                return sample.value
    return None


def test_a_cycle_with_a_defect_is_not_the_last(accountant: Any, controller_of: Make, clock: VirtualClock) -> None:
    accountant.spend(a=0.6, b=0.4)
    tasks, stop = BackgroundTasks(clock), threading.Event()
    task, told = tasks.add("cycle"), list[Exception]()
    health, metrics = Health(clock, 60, tasks), Metrics(clock, 60, tasks)
    seen: list[tuple[str | None, float | None]] = []
    controller: Any = None

    def pods() -> tuple[()]:
        """Asked in each cycle; of the first two a defect."""
        if len(told) < 2:
            raise KeyError("spec")
        return ()

    def reload() -> None:
        seen.append((health.ready(), _stopped(metrics, "cycle")))
        if len(seen) == 4:
            stop.set()

    def observe(_: object) -> None:
        health.beat()

    controller = controller_of(
        policy_of(), cluster_of([queue_object(name) for name in "abc"]), observe=observe, reload=reload, pods=pods
    )
    controller.run(stop, lambda: task.guarded(told.append))
    assert seen[0] == ("the first cycle has not ended yet", 0)
    assert seen[1:3] == [("cycle failed: see the log for the reason", 1)] * 2
    assert seen[3] == (None, 0), "the third cycle did its work"
    assert [type(error) for error in told] == [KeyError, KeyError]


def test_a_cycle_that_hangs_is_seen_within_a_minute(clock: VirtualClock) -> None:
    tasks = BackgroundTasks(clock)
    health, metrics = Health(clock, 600, tasks), Metrics(clock, 600, tasks)
    health.beat()
    with tasks.add("cycle", 50).running():
        assert health.ready() is None
        clock.advance(55_000)
        assert health.ready() == "cycle has not ended for 55 s: see the log for the reason"
        assert _stopped(metrics, "cycle") == 1
    assert health.ready() is None


@pytest.mark.parametrize("raises", [True, False])
def test_work_that_ends_is_begun_again(clock: VirtualClock, raises: bool) -> None:
    tasks, stop, begun = BackgroundTasks(clock), threading.Event(), threading.Semaphore(0)

    def work(_stop: threading.Event, _task: BackgroundTask) -> None:
        begun.release()
        if raises:
            raise ValueError("not an object")

    with structlog.testing.capture_logs() as logs, run_beside("watch", work, stop, tasks):
        assert begun.acquire(timeout=30)
        assert begun.acquire(timeout=30)
        assert (tasks.states()["watch"].failures > 0) == raises
        assert ("watch" in tasks.faults()) == raises
    assert {log["what"] for log in logs} == ({"watch"} if raises else set())
    assert not tasks.faults(), "it is not needed any more"


class Instantly(threading.Event):
    """Waits for nothing."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_a_watch_tells_of_its_progress_and_hangs_where_no_answer_comes(clock: VirtualClock) -> None:
    """An API server that is away is answered by trying again; only a request that never ends is a fault."""
    stop, asked = Instantly(), list[int]()
    task = BackgroundTasks(clock).add("pods", 285)

    class Api:
        def get(self, *_: object, **__: object) -> bytes:
            asked.append(1)
            if len(asked) == 3:
                clock.advance(286_000)
                assert task.state().fault == "has not ended for 286 s"
                stop.set()
            raise Unavailable("no answer")

    pods = Reflector(Api(), POD.path(), dict, lambda obj: obj)  # type: ignore[arg-type, var-annotated]
    pods.run(stop, task)
    assert len(asked) == 3
    assert pods.fault == "no answer"


def test_a_signal_inside_the_event_that_it_sets_is_not_lost() -> None:
    """A handler that sets the event itself waits for ever for the main thread that it interrupts."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=patience_s(), check=True
    )
    assert done.stdout == "ended\n"
