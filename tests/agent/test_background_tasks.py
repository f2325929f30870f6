"""The agent's background tasks: each thread is one, and a task that raises, hangs or dies is reported within a
minute."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from agent.core.readings import NodeSnapshot
from agent.core.settings import AgentSettings
from agent.gpu_readers.chosen import ChosenReader, GpuReaders
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_device import Access
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.holders.kubelet.device_allocations import ResourceClaims, SliceStore
from agent.holders.kubelet.kubelet_grpc_client import Kubelet
from agent.holders.kubelet.kubernetes_source import KubernetesSource, NodeStore
from agent.holders.kubelet.lean_list_watch import PATH, ApiServer, LeanReflector, PodStore
from agent.main_loop import Agent
from agent.metrics.exporter import AgentMetrics, Exposition
from agent.simulation.simulated_node import SimulatedNode, SimulatedSource
from agent.upload.spool import Outbox
from agent.upload.uploader import ShipResult, Uploader
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock, VirtualClock
from gputally.base.errors import AgentError
from tests.agent.readers import node_source
from tests.agent.sample_values import T0
from tests.deadlines import until
from tests.fakes.apiserver.server import FakeApiServer
from tests.fakes.kubelet.server import FakeKubelet
from tests.fakes.nvml.library import FakeNvml
from tests.plugin_cases import plugin_cases

SAMPLE, LISTENER = "sample", "metrics"
OTHERS = ("fake", "Thread-")
"""Prefixes of thread names of the test's fakes, and of one request to the listener."""
READERS = {cases.TASK: cases for cases in plugin_cases("agent/gpu_readers").values()}
THREADS = ("ship", "kubelet", "pods", "node", "slices", "claims", *READERS, LISTENER)
WATCHED_BY_ITS_CALLER = "nvml"
"""The thread of calls to the driver. After a call's time limit its caller continues without the answer."""


def asked(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def stopped(port: int) -> dict[str, float]:
    """Return the values of `gputally_task_stopped` by task."""
    lines = asked(port, "/metrics")[1].splitlines()
    shown = [line.split() for line in lines if line.startswith("gputally_task_stopped{")]
    return {series.split('"')[1]: float(value) for series, value in shown}


@dataclass
class Whole:
    """An agent with every optional source, on threads of its own."""

    tasks: BackgroundTasks
    port: int
    stop: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def whole(
    nvml: FakeNvml, kubelet: FakeKubelet, api_server: FakeApiServer, token: Path, tmp_path: Path
) -> Iterator[tuple[Whole, set[threading.Thread]]]:
    chosen = AgentSettings(
        node="node-1", kubelet_socket=str(kubelet.path), api_url=api_server.url, api_token_file=str(token),
        sample_s=0.05, grace_s=0,
    )  # fmt: skip
    clock, before = SystemClock(), set(threading.enumerate())
    tasks = BackgroundTasks(clock, (AgentError,))
    gpus = Gpus(Driver(), access=Access(processes=False))
    beside = [cases.started(lambda: "", clock, tasks) for cases in READERS.values()]
    readers = GpuReaders((ChosenReader("nvml", gpus), *(reader for reader, _ in beside)), clock)
    source = node_source(chosen, readers, tmp_path, clock, tasks)
    outbox = Outbox(tmp_path / "spool", clock, 10 * 2**20, 86_400_000)
    uploader = Uploader(outbox, "", "c", "node-1", "boot", None, clock)
    metrics = AgentMetrics("node-1", "0", tasks=tasks)
    agent = Agent(chosen, source, outbox, uploader, clock, metrics=metrics, tasks=tasks)
    exposition = Exposition("127.0.0.1", 0, metrics.exposition, agent.alive, tasks)
    made = Whole(tasks, exposition.port)
    main = threading.Thread(target=agent.run, args=(made.stop,), name="main of the agent")
    main.start()
    yield made, before | {main}
    made.stop.set()
    main.join(30)
    for _, end in beside:
        end()
    exposition.close()


def test_every_thread_is_a_watched_task(whole: tuple[Whole, set[threading.Thread]]) -> None:
    running, others = whole
    until(lambda: SAMPLE in stopped(running.port), "the first sample does not end")
    threads = {thread.name for thread in set(threading.enumerate()) - others}
    assert {name for name in threads if not name.startswith(OTHERS)} - {WATCHED_BY_ITS_CALLER} == set(THREADS)
    assert running.tasks.states().keys() == {*THREADS, SAMPLE}
    assert stopped(running.port) == dict.fromkeys(sorted([*THREADS, SAMPLE]), 0)
    assert asked(running.port, "/readyz") == (200, "ok\n")
    assert asked(running.port, "/livez") == (200, "ok\n")


class Ended(BaseException):
    """Ends a thread: no handler catches it."""


class Step:
    """Stands in for the kubelet, the API server, an exporter or the accountant of a task."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0
        self.waits, self.released = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> Any:
        self.calls += 1
        if self.how == "dies":
            raise Ended
        if self.how == "hangs" or self.calls > 1:
            self.waits.set()
            self.released.wait(60)
        raise ZeroDivisionError("a defect")


class Asked:
    """A kubelet's channel, an API server or an uploader that answers as the step says."""

    def __init__(self, step: Step) -> None:
        self.call = self.page = step

    def close(self) -> None:
        """Hold nothing."""


class AskedClaims(ResourceClaims):
    """Requests claims although no pod names one."""

    def __init__(self, step: Step, clock: VirtualClock) -> None:
        super().__init__(cast(ApiServer, Asked(step)), clock)
        self.step = step  # type: ignore[method-assign]


def started(name: str, step: Step, clock: VirtualClock, tasks: BackgroundTasks) -> Callable[[], None]:
    """Start the task, with a function that ends it."""
    if name in READERS:
        _, end_reader = READERS[name].started(step, clock, tasks)
        return cast(Callable[[], None], end_reader)
    api = cast(ApiServer, Asked(step))
    other = Step("hangs")
    kubelet = Kubelet(Path("/none"), clock, Asked(step if name == "kubelet" else other))
    followed: dict[str, Any] = {}
    if name == "pods":
        pods = PodStore("n", (), clock, lambda: None)
        followed["pods"] = (pods, LeanReflector(api, PATH, "spec.nodeName=n", pods, clock))
    elif name == "node":
        node = NodeStore("n", lambda before, reason: None)
        followed["node"] = (node, LeanReflector(api, PATH, "metadata.name=n", node, clock))
    elif name == "slices":
        slices = SliceStore()
        followed["slices"] = (slices, LeanReflector(api, PATH, "spec.nodeName=n", slices, clock))
    elif name == "claims":
        followed["claims"] = AskedClaims(step, clock)
    source = KubernetesSource(kubelet, clock, **followed, tasks=tasks)
    source.start()

    def end() -> None:
        other.released.set()
        source.close()

    return end


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", sorted(set(THREADS) - {"ship", LISTENER}))
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
    end = started(name, step, clock, tasks)
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
