"""Background tasks: a run that fails, hangs or loses its thread is reported as a fault."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from gputally.base.background_tasks import PATIENCE_S, BackgroundTask, BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.server.logs_and_metrics import TaskMetrics


class Refused(Exception):
    """The exception that these tests' tasks may raise without a defect."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(0)


@pytest.fixture
def tasks(clock: VirtualClock) -> BackgroundTasks:
    return BackgroundTasks(clock, (Refused,))


@pytest.mark.parametrize(
    ("error", "fault", "stopped"),
    [
        (Refused("disk is full\nsecond line"), "failed: disk is full", False),
        (ValueError("bad figure"), "failed: ValueError: bad figure", True),
        (KeyError(), "failed: KeyError", True),
    ],
)
def test_a_run_that_fails_is_a_fault_until_one_succeeds(
    tasks: BackgroundTasks, error: Exception, fault: str, stopped: bool
) -> None:
    task = tasks.add("archive")
    for failures in (1, 2):
        with pytest.raises(type(error)), task.running():
            raise error
        state = task.state()
        assert (state.fault, state.stopped, state.failures, state.running_s) == (fault, stopped, failures, None)
    assert tasks.faults() == {"archive": fault}
    with task.running():
        assert tasks.faults() == {"archive": fault}, "not before it is done"
    assert not tasks.faults()
    assert task.state().failures == 2


def test_a_task_whose_thread_is_about_to_start_has_no_fault(
    tasks: BackgroundTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, seen, stop = threading.Thread.start, list[object](), threading.Event()

    def observed(thread: threading.Thread) -> None:
        seen.append(dict(tasks.faults()))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", observed)
    thread = tasks.start("ship", lambda stop, _: stop.wait() and None, stop, seen.append)
    assert seen == [{}]
    stop.set()
    thread.join()


def test_a_run_that_hangs_is_seen_within_a_minute(tasks: BackgroundTasks, clock: VirtualClock) -> None:
    task = tasks.add("inventory")
    assert PATIENCE_S < 60
    clock.advance(3_600_000)
    assert not tasks.faults(), "between two runs nothing hangs"
    task.begin()
    clock.advance(round(PATIENCE_S * 1000))
    assert not tasks.faults()
    clock.advance(1000)
    assert tasks.faults() == {"inventory": "has not ended for 46 s"}
    assert task.state().stopped
    task.begin()  # progress
    assert not tasks.faults()


def test_a_thread_that_ends_is_a_fault_unless_the_task_is_over(tasks: BackgroundTasks) -> None:
    task, go = tasks.add("watch"), threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    task.watch(thread)
    assert not tasks.faults()
    go.set()
    thread.join()
    assert tasks.faults() == {"watch": "its thread has ended"}
    assert task.state().stopped
    task.end()
    assert not tasks.faults()


def test_every_task_has_its_series(tasks: BackgroundTasks) -> None:
    registry = CollectorRegistry()
    registry.register(TaskMetrics(tasks))
    figure: Callable[[str, str], float | None] = lambda name, task: registry.get_sample_value(name, {"task": task})  # noqa: E731
    good, bad = tasks.add("good"), tasks.add("bad")
    with good.running():
        pass
    with pytest.raises(ValueError, match="x"), bad.running():
        raise ValueError("x")
    assert [figure("gputally_task_stopped", task) for task in ("good", "bad")] == [0, 1]
    assert [figure("gputally_task_failures_total", task) for task in ("good", "bad")] == [0, 1]


def test_work_that_raises_is_told_and_begins_anew_until_the_end() -> None:
    clock, stop, told = VirtualClock(1_000), threading.Event(), list[Exception]()
    begun, faults = list[int](), list[str | None]()
    tasks = BackgroundTasks(clock)

    def work(stop: threading.Event, task: BackgroundTask) -> None:
        begun.append(clock.monotonic_ms())
        faults.append(task.state().fault)
        if len(begun) < 3:
            raise KeyError(len(begun))
        task.progress()
        faults.append(task.state().fault)
        stop.set()

    tasks.start("watch", work, stop, told.append).join(30)
    assert begun == [0, 5_000, 10_000]
    assert faults == [None, "failed: KeyError: 1", "failed: KeyError: 2", None]
    assert [error.args for error in told] == [(1,), (2,)]
    assert tasks.states()["watch"].failures == 2
    assert not tasks.faults(), "it was told to stop"
