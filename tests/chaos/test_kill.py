"""Three agents and an accountant as processes, each killed ten times: afterwards the ledger is exact.

Only the hardware is simulated. Every process is the real program, killed with SIGKILL at random moments and started
again. Held GPUs must then be allocated for every microsecond of the span, to the right holder and once; the accounts of
every GPU must add up to the span."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chaos.killed_program import SCENARIOS, Program, agent_of
from tests.deadlines import Deadline, patience_s
from tests.real.programs import free_ports

KILLS = 10
"""Number of kills of each process."""
SEED = 20261001


@pytest.fixture
def url() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def programs(tmp_path: Path, url: str, zygote: subprocess.Popen[str]) -> Iterator[dict[str, Program]]:
    """Start the accountant, then the agents; all are killed when the test ends."""
    found = {"accountant": Program("accountant", _accountant(tmp_path, url), tmp_path, zygote)}
    found |= {name: agent_of(tmp_path, name, url, zygote) for name in SCENARIOS}
    try:
        yield found
    finally:
        for program in found.values():
            program.kill()


def _accountant(folder: Path, url: str) -> list[str]:
    settings = folder / "accountant.yaml"
    listen = url.removeprefix("http://")
    settings.write_text(
        yaml.safe_dump(
            {"data": str(folder / "data"), "listen": listen, "auth": "off", "linger_ms": 5, "checkpoint_seconds": 2}
        )
    )
    return ["accountant", "serve", "--config", str(settings)]


def _get(url: str, path: str, **query: object) -> Any:
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(query)}", timeout=patience_s()) as answer:
        return json.load(answer)


def _until(program: Program, met: Callable[[], bool]) -> None:
    """Wait until `met` is true while `program` runs. The test fails at the deadline."""
    deadline = Deadline()
    while not deadline.passed:
        with contextlib.suppress(OSError):
            if met():
                return
        program.live_for(0.1)
    pytest.fail(f"{program.name}: still not so after {deadline}:\n{program.log.read_text(errors='replace')[-3000:]}")


def _usage(url: str, start_ms: int, end_ms: int, by: str) -> dict[str, Counter[str]]:
    lines = _get(url, "/v1/usage", start=start_ms, end=end_ms, by=by)["lines"]
    found: dict[str, Counter[str]] = {}
    for line in lines:
        found.setdefault("/".join(line["key"].values()), Counter()).update(line["accounts_gpu_us"])
    return found


def _allocated(accounts: Counter[str]) -> int:
    return accounts["busy"] + accounts["allocated_idle"] + accounts["allocated_unknown"]


def test_killed_ten_times_each_the_books_are_exact(programs: dict[str, Program], url: str) -> None:
    chance = random.Random(SEED)
    for program in programs.values():
        program.start(fork=False)
    accountant = programs["accountant"]
    nodes = [name for name in programs if name != "accountant"]

    def all_nodes_known() -> bool:
        now = time.time_ns() // 1_000_000
        return len(_usage(url, now - 600_000, now, "node")) == len(nodes)

    _until(accountant, all_nodes_known)
    begin_ms = (time.time_ns() // 1_000_000_000 + 1) * 1000

    victims = [name for name in programs for _ in range(KILLS)]
    chance.shuffle(victims)
    for name in victims:
        victim = programs[name]
        victim.live_for(chance.uniform(0.05, 0.8))
        victim.kill()
        # The last start is ordinary too: only such a process has an exit status.
        victim.start(fork=victim.kills < KILLS)
    assert {program.kills for program in programs.values()} == {KILLS}

    end_ms = (time.time_ns() // 1_000_000_000 + 2) * 1000
    held = ["whole/GPU-whole-0", "sliced/GPU-sliced-0", "mig/GPU-mig-0"]

    def booked_to_the_end() -> bool:
        last = _usage(url, end_ms - 1000, end_ms, "node,gpu")
        return all(_allocated(last.get(gpu, Counter())) == 1_000_000 for gpu in held)

    _until(accountant, booked_to_the_end)
    for name in nodes:
        assert programs[name].stop() == 0

    span_us = (end_ms - begin_ms) * 1000
    by_gpu = _usage(url, begin_ms, end_ms, "node,gpu")
    assert sorted(by_gpu) == sorted([*held, "whole/GPU-whole-1"])
    for accounts in by_gpu.values():
        assert sum(accounts.values()) == span_us
    for gpu in held:
        assert (gpu, _allocated(by_gpu[gpu])) == (gpu, span_us)
    # Nobody's time is not carried over a restart: it is either seen or unmetered, and never somebody's.
    unheld = by_gpu["whole/GPU-whole-1"]
    assert unheld["unallocated"] + unheld["unmetered"] == span_us

    by_pod = _usage(url, begin_ms, end_ms, "namespace,pod")
    quarters = {pod: sum(accounts.values()) for pod, accounts in by_pod.items() if pod.startswith("speech/")}
    assert quarters == {f"speech/note-{i}": span_us // 4 for i in range(4)}
    check = _get(url, "/v1/check", start=begin_ms, end=end_ms)
    assert (check["imbalance_gpu_us"], check["differences"], check["quarantined_rows"]) == (0, [], 0)
    assert accountant.stop() == 0
