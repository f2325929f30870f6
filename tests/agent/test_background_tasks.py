"""The agent's background tasks: each thread is one, and a task that raises, hangs or dies is reported within a
minute."""

from __future__ import annotations

import http.client
import threading
from pathlib import Path

import pytest

from agent.core.readings import NodeSnapshot
from agent.core.settings import AgentSettings
from agent.main_loop import Agent
from agent.metrics.exporter import AgentMetrics, Exposition
from agent.simulation.simulated_node import SimulatedNode, SimulatedSource
from agent.upload.spool import Outbox
from agent.upload.uploader import ShipResult, Uploader
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.errors import AgentError
from tests.agent.exposition_pages import asked, stopped
from tests.agent.sample_values import T0
from tests.agent.task_steps import Step, task_cases
from tests.deadlines import until

SAMPLE, LISTENER = "sample", "metrics"
TASKS = task_cases()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("raises", "failed: ZeroDivisionError: a defect"),
        ("hangs", "has not ended for 59 s"),
        ("dies", "its thread has ended"),
    ],
)
def test_what_does_not_work_is_seen_within_a_minute(clock: VirtualClock, name: str, how: str, fault: str) -> None:
    tasks, step = BackgroundTasks(clock), Step(how)
    exposition = Exposition("127.0.0.1", 0, AgentMetrics("n", "0", tasks=tasks).exposition, lambda: True, tasks)
    end = TASKS[name](step, clock, tasks)
    try:
        if how == "dies":
            until(lambda: name in tasks.faults(), "its thread does not end")
        else:
            assert step.waits.wait(30)
        if how == "hangs":
            clock.advance(59_000)
        until(lambda: LISTENER not in tasks.faults(), "the listener looks up twice a second")
        answer = asked(exposition.port, "/readyz")
        assert (answer[0], f"{name}: {fault}" in answer[1].splitlines()) == (503, True), answer
        assert asked(exposition.port, "/livez")[0] == 200
        assert stopped(exposition.port)[name] == 1
    finally:
        step.released.set()
        end()
        exposition.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["raises", "hangs", "dies"])
def test_an_upload_that_does_not_work_is_seen_while_the_sampling_goes_on(
    clock: VirtualClock, tmp_path: Path, how: str
) -> None:
    tasks, step, stop = BackgroundTasks(clock), Step(how), threading.Event()
    outbox = Outbox(tmp_path / "spool", clock, 10 * 2**20, 86_400_000)

    class Failing(Uploader):
        def ship(self, upto: int | None = None) -> ShipResult:
            result: ShipResult = step()
            return result

    class OneGpu(SimulatedSource):
        def snapshot(self, at_ms: int) -> NodeSnapshot:
            if "ship" in tasks.faults():
                seen.append(tasks.faults()["ship"])
                stop.set()
            return super().snapshot(at_ms)

    seen: list[str] = []
    source = OneGpu(SimulatedNode("n1", [], start_ms=T0))
    uploader = Failing(outbox, "", "c", "n1", "boot", None, clock)
    agent = Agent(AgentSettings(node="n1", grace_s=0), source, outbox, uploader, clock, tasks=tasks)
    agent.run(stop)
    step.released.set()
    assert seen[0].startswith({"raises": "failed: Zero", "hangs": "has not ended for 4", "dies": "its thread"}[how])


@pytest.mark.parametrize("expected", [True, False])
def test_a_source_that_raises_is_a_fault_until_a_sample_ends(
    clock: VirtualClock, tmp_path: Path, expected: bool
) -> None:
    tasks = BackgroundTasks(clock, (AgentError,))
    outbox = Outbox(tmp_path / "spool", clock, 10 * 2**20, 86_400_000)
    errors: list[Exception] = [AgentError("no driver") if expected else KeyError("a defect")]

    class Failing(SimulatedSource):
        def snapshot(self, at_ms: int) -> NodeSnapshot:
            if errors:
                raise errors.pop()
            return super().snapshot(at_ms)

    uploader = Uploader(outbox, "", "c", "n1", "boot", None, clock)
    source = Failing(SimulatedNode("n1", [], start_ms=T0))
    agent = Agent(AgentSettings(node="n1"), source, outbox, uploader, clock, tasks=tasks)
    agent.sample()
    state = tasks.states()[SAMPLE]
    assert (state.fault, state.stopped) == (
        ("failed: no driver", False) if expected else ("failed: KeyError: 'a defect'", True)
    )
    agent.sample()
    assert tasks.states()[SAMPLE].fault is None
    agent.shutdown()


def test_a_defect_in_a_scrape_is_reported_and_counted(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    tasks, broken = BackgroundTasks(clock), [True]
    metrics = AgentMetrics("n", "0", tasks=tasks)

    def exposition() -> bytes:
        if broken:
            broken.clear()
            raise ZeroDivisionError("a defect")
        return metrics.exposition()

    served = Exposition("127.0.0.1", 0, exposition, lambda: True, tasks)
    try:
        with pytest.raises(http.client.RemoteDisconnected):
            asked(served.port, "/metrics")
        until(lambda: "a request to the metrics port failed" in caplog.text, "nothing is logged")
        assert 'gputally_task_failures_total{task="metrics"} 1' in asked(served.port, "/metrics")[1]
    finally:
        served.close()
