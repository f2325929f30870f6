"""Documents are rendered in other processes: the same bytes, within limits, and only while somebody waits."""

from __future__ import annotations

import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from accountant.core.errors import CannotRender
from accountant.exports import rendering_process
from accountant.exports.protocol import exports
from accountant.exports.rendering_process import written
from gputally.base import called_off
from gputally.base.called_off import CalledOff, Work
from tests.billing.usage_rows import held
from tests.deadlines import until
from tests.exports.format_cases import TEXT
from tests.reports import niceness_at_import, sample_month

BINARY = [name for name, export in exports().items() if export.binary and not export.charges and name != "pdf"]
"""The formats that another process renders and that need no library of the system."""


def test_a_document_of_another_process_has_the_same_bytes() -> None:
    report = sample_month.october(held("2026-10-01", "2026-10-03", gpus=8, busy=0.01))
    for form in BINARY:
        assert rendering_process.render(form, report) == written(form, report), form


def test_the_server_keeps_its_process_for_the_next_document() -> None:
    async def both() -> list[int]:
        return [await rendering_process.apart(os.getpid) for _ in range(2)]

    first, second = anyio.run(both)
    assert first == second != os.getpid()


def test_a_process_is_after_the_server_in_line_before_it_imports_anything() -> None:
    for _ in range(2):  # the process of the first document makes the second one
        importing = anyio.run(rendering_process.apart, niceness_at_import.read)
        assert importing == os.getpriority(os.PRIO_PROCESS, os.getpid()) + rendering_process._NICE


def test_a_process_that_somebody_made_nicer_still_makes_the_next_document() -> None:
    async def scenario() -> None:
        process = await rendering_process.apart(os.getpid)
        if os.geteuid() == 0:
            await rendering_process.apart(os.seteuid, 65_534)  # without the right to make it less nice
        os.setpriority(os.PRIO_PROCESS, process, 19)
        assert await rendering_process.apart(os.getpid) == process

    anyio.run(scenario)


def test_a_document_that_takes_too_long_or_too_much_is_refused_and_the_next_one_is_made() -> None:
    async def scenario() -> None:
        with pytest.raises(CannotRender, match="longer"):
            await rendering_process.apart(time.sleep, 600, most_s=0.5)
        with pytest.raises(CannotRender, match="MiB"):
            await rendering_process.apart(bytearray, (rendering_process.MOST_MIB + 256) * 2**20)
        with pytest.raises(CannotRender, match="MiB"):
            await rendering_process.apart(os.abort)
        assert await rendering_process.apart(max, 1, 2) == 2

    anyio.run(scenario)


def test_a_document_does_not_wait_for_two_others() -> None:
    async def scenario() -> None:
        async with anyio.create_task_group() as others:
            for _ in range(2):
                others.start_soon(rendering_process.apart, time.sleep, 600)
            await anyio.wait_all_tasks_blocked()
            assert await rendering_process.apart(max, 1, 2, most_s=300) == 2
            others.cancel_scope.cancel()

    anyio.run(scenario)


def children() -> set[int]:
    """Return the processes that this one has started, without those that have ended and were asked for their status."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def test_a_document_that_is_called_off_while_its_process_starts_leaves_no_process() -> None:
    before = children()

    async def scenario() -> None:
        async with anyio.create_task_group() as asked:
            asked.start_soon(rendering_process.apart, time.sleep, 600)
            while children() == before:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            asked.cancel_scope.cancel()

    anyio.run(scenario)
    assert children() == before


def test_a_machine_may_allow_less_memory() -> None:
    less = rendering_process.MOST_MIB * 2**19

    async def scenario() -> tuple[int, int]:
        await rendering_process.apart(resource.setrlimit, resource.RLIMIT_DATA, (less, less))
        return await rendering_process.apart(resource.getrlimit, resource.RLIMIT_DATA)

    assert anyio.run(scenario) == (less, less)


def test_the_process_is_killed_when_nobody_waits_for_its_document() -> None:
    work = Work()

    async def scenario() -> None:
        called_off.make_current(work)
        with pytest.raises(CalledOff):
            await rendering_process.apart(time.sleep, 600)

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(anyio.run, scenario)
        until(lambda: bool(work._stops), "the process should run")
        work.call_off()
        made.result()


def test_a_thread_of_the_server_uses_the_servers_processes() -> None:
    report = sample_month.october(held("2026-10-01", "2026-10-02"))

    async def scenario() -> bytes:
        return await to_thread.run_sync(rendering_process.render, TEXT.name, report)

    assert anyio.run(scenario) == written(TEXT.name, report)
