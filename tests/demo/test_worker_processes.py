"""Parts of the demo in processes of their own: they answer, they report errors, and their loss is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fairshare.simulator.simulation_model import SimulatedJob, Stopped, slots_of
from gputally.base.errors import AccountantError
from gputally.base.units import MS_PER_HOUR, US_PER_MS
from gputally.demo import cluster_and_workload
from gputally.demo.options import DemoOptions
from gputally.demo.scenario import START_MS, build
from gputally.demo.worker_processes import AgentPool, SiteConfig, WorkerLost, WorkerProcess, encode_call

PART = "tests.demo.test_worker_processes:Part"
HOUSE = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HOUSE)}


class Part:
    """A part with methods to call. It writes a note when it is closed."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise AccountantError(f"no folder {folder}")
        self._folder = folder

    def add(self, a: int, b: int) -> int:
        return a + b

    def pid(self) -> int:
        return os.getpid()

    def read(self, name: str) -> str:
        return (self._folder / name).read_text()

    def close(self) -> None:
        (self._folder / "closed").write_text("in good order")


@contextmanager
def worker(folder: Path, log_file: Path | None = None, pipes: int = 1) -> Iterator[WorkerProcess]:
    made = WorkerProcess("the part", PART, pipes=pipes, log_file=log_file)
    try:
        made.start(folder)
        yield made
    finally:
        made.close()


def test_it_answers_in_a_process_of_its_own_and_closes_in_good_order(tmp_path: Path) -> None:
    with worker(tmp_path, pipes=2) as part:
        part.send(encode_call("add", 1, 2), pipe=1)
        assert part.call("pid") != os.getpid()
        assert part.result(1) == 3
    assert (tmp_path / "closed").read_text() == "in good order"


def test_what_was_foreseen_is_said_as_it_is_and_the_rest_with_its_kind(tmp_path: Path) -> None:
    with worker(tmp_path, tmp_path / "log") as part:
        with pytest.raises(WorkerLost, match=f"^{tmp_path}/none: No such file or directory$"):
            part.call("read", "none")
        with pytest.raises(WorkerLost, match=r"^the part failed: TypeError: unsupported operand"):
            part.call("add", 1, "2")
        assert part.call("add", 1, 2) == 3
    log = (tmp_path / "log").read_text()
    assert log.count("Traceback") == 1
    assert "unsupported operand" in log


def test_a_part_that_cannot_be_made_says_why_to_whoever_asks_first(tmp_path: Path) -> None:
    with worker(tmp_path / "none") as part, pytest.raises(WorkerLost, match=f"^no folder {tmp_path}/none$"):
        part.call("pid")


def test_a_process_that_was_killed_is_missed(tmp_path: Path) -> None:
    with worker(tmp_path) as part:
        os.kill(part.call("pid"), signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"^the part has ended$"):
            part.call("add", 1, 2)


def test_one_that_was_never_started_ends_all_the_same() -> None:
    WorkerProcess("the part", PART).close()


def test_where_the_other_side_is_killed_nothing_of_it_stays(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "ledger").write_text("")
    killed = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from gputally.demo.worker_processes import WorkerProcess\n"
        "if __name__ == '__main__':\n"
        f"    part = WorkerProcess('the part', {PART!r})\n"
        f"    part.start(Path({str(tmp_path)!r}), scratch=Path({str(scratch)!r}))\n"
        "    print(part.call('pid'), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "killed.py"
    script.write_text(killed)
    told = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=False, cwd=HOUSE, env=ENVIRONMENT)
    assert told.returncode == -signal.SIGKILL
    # Its output has ended, and so has the last process that could have written to it.
    assert told.stdout
    assert (tmp_path / "closed").read_text() == "in good order"
    assert not scratch.exists()
    assert tmp_path.exists()


NODES = cluster_and_workload.nodes()[:2]
LATER = START_MS + MS_PER_HOUR


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[AgentPool]:
    config = SiteConfig(
        nodes=NODES,
        queues=frozenset({"llm"}),
        folder=tmp_path,
        url="",
        interval_s=900,
        start_ms=START_MS,
        faults=build(DemoOptions(days=1)).faults,
        seed=1,
    )
    agents = AgentPool(tmp_path / "log")
    agents.create_sites(config)
    yield agents
    agents.close()


def test_an_idle_hour_is_metered_by_all_of_them(agents: AgentPool) -> None:
    agents.begin([])
    agents.start_hour([], LATER)
    agents.finish_hour()
    agents.start_delivery()
    agents.start_hour([], LATER)
    agents.finish_delivery()
    agents.finish_hour()
    assert agents.deliver_alone(NODES[0].name) == 8 * 4
    result = agents.finish(LATER)
    assert result.totals.accounts["unallocated"] == sum(result.totals.accounts.values()) == 16 * MS_PER_HOUR * US_PER_MS
    assert result.closed == 16 * 4


def test_what_fails_there_is_said_here_and_logged_there(agents: AgentPool, tmp_path: Path) -> None:
    never_started = Stopped(LATER, SimulatedJob("j", "llm", 0, 1, 1), slots_of(NODES[0])[:1], 1, "finished")
    agents.begin([])
    agents.start_hour([never_started], LATER)
    with pytest.raises(WorkerLost, match=r"^a process with agents failed: ValueError: .* holds no device of this node"):
        agents.finish_hour()
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_process_that_is_gone_is_noticed(agents: AgentPool) -> None:
    agents.begin([])
    agents.close()
    with pytest.raises(WorkerLost, match="has ended"):
        agents.start_delivery()
