"""All threads of a whole agent are watched tasks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.core.settings import AgentSettings
from agent.gpu_readers.chosen import ChosenReader, GpuReaders
from agent.gpu_readers.nvml.driver_lifecycle import Gpus
from agent.gpu_readers.nvml.nvml_device import Access
from agent.gpu_readers.nvml.nvml_library import Driver
from agent.main_loop import Agent
from agent.metrics.exporter import AgentMetrics, Exposition
from agent.upload.spool import Outbox
from agent.upload.uploader import Uploader
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock
from gputally.base.errors import AgentError
from tests.agent.exposition_pages import asked, stopped
from tests.agent.readers import node_source
from tests.agent.task_steps import task_cases
from tests.deadlines import until
from tests.fakes.apiserver.server import FakeApiServer
from tests.fakes.kubelet.server import FakeKubelet
from tests.fakes.nvml.library import FakeNvml
from tests.plugin_cases import plugin_cases

SAMPLE, LISTENER = "sample", "metrics"
OTHERS = ("fake", "Thread-")
"""Prefixes of thread names of the test's fakes, and of one request to the listener."""
READERS = {cases.TASK: cases for cases in plugin_cases("agent/gpu_readers").values()}
THREADS = ("ship", *task_cases(), LISTENER)
WATCHED_BY_ITS_CALLER = "nvml"
"""The thread of calls to the driver. After a call's time limit its caller continues without the answer."""


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
