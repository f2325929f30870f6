"""Every thread of the programs is a watched task, or short-lived with somebody who waits for it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "accountant", "fairshare", "gputally")
WITHOUT_A_TASK = {
    "agent/devices/nvml_library.py": "a call to the driver; who made it goes on after its time limit",
    "accountant/history_import/import_run.py": "senders of one import, whose command waits for them",
    "fairshare/web/what_if_worker.py": "one preview, whose page shows its progress, its failure and its time limit",
    "gputally/demo/simulated_machines.py": "the demo's agents, which the demo waits for",
    "gputally/demo/pipeline.py": "the demo's scheduler, which the demo waits for",
    "gputally/demo/worker_processes.py": "the orders of one of the demo's processes",
}


def started_in(path: Path) -> int:
    """How many calls make threads."""
    names = [
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
    ]
    return sum(name in ("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread") for name in names)


def test_every_thread_is_watched() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    starting = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths if started_in(path)}
    assert {name for name, text in starting.items() if ".watch(" not in text} == WITHOUT_A_TASK.keys()
