"""What the kubelet's source keeps in a file."""

from __future__ import annotations

from pathlib import Path

from agent.holders.kubelet.lean_list_watch import BoundPods


def read_kept_file(file: Path) -> None:
    BoundPods(file).keep_only(())
