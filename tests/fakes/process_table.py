"""A process table in the form of /proc."""

from __future__ import annotations

from pathlib import Path


def add_process(
    root: Path, pid: int, cgroup: str = "0::/user.slice", comm: str = "python", start: int = 1000, uid: int = 4242
) -> Path:
    """Add a process to the table in `root` or replace it, and return `root`. start: in clock ticks after boot."""
    folder = root / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["S", *["0"] * 18, str(start), *["0"] * 10]  # field 3 on; field 22 is the start time
    (folder / "stat").write_text(f"{pid} (odd) name ({comm})) {' '.join(fields)}\n")
    (folder / "cgroup").write_text(cgroup + "\n")
    (folder / "comm").write_text(comm + "\n")
    (folder / "status").write_text(f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    return root
