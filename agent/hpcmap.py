"""Which jobs hold which GPUs, from the folder that a batch system's prolog keeps for dcgm-exporter.

One file per GPU, named by its index (`0`) or, for a MIG instance, by index and GPU instance (`0.1`); one job id
per line. Source: dcgm-exporter, DCGM_HPC_JOB_MAPPING_DIR. Jobs of one file share its device equally, as
nothing there says otherwise. The folder is read anew with every reading, bounded; a file that cannot be
understood is named and left out, the others go on. No folder at all is a fault, not an empty machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.model import Allocation, Gpu
from agent.pods import Pods
from agent.wire import Holder

MAX_FILES = 1_024
MAX_FILE_BYTES = 64 * 1024
MAX_JOBS = 256
_NAME = re.compile(r"([0-9]{1,4})(?:\.([0-9]{1,4}))?")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\[\]+-]{0,63}")


class HpcJobs:
    """Who holds what by the mapping folder; shaped like `agent.pods.PodsFile`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Pods:  # noqa: ARG002 - the folder has no times
        """What the folder says now."""
        faults: list[str] = []
        held: list[Allocation] = []
        try:
            with os.scandir(self._root) as entries:
                names = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name))[:MAX_FILES]
        except OSError as error:
            return Pods((), (), f"{self._root}: {error.strerror}")
        for name in names:
            try:
                held += _allocations(name, self._jobs(name), gpus)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                faults.append(f"{self._root / name}: {reason}")
        return Pods((), tuple(held), "; ".join(faults))

    def _jobs(self, name: str) -> tuple[str, ...]:
        """Raises OSError, and ValueError for what is no list of jobs."""
        with (self._root / name).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        return parse_jobs(text.decode("utf-8", "replace"))


def parse_jobs(text: str) -> tuple[str, ...]:
    """The job ids of one file, each once, in order. Raises ValueError for a line that is none."""
    jobs: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        job = line.strip()
        if not job:
            continue
        if not _JOB.fullmatch(job):
            raise ValueError(f"line {number}: not a job id: {job[:64]!r}")
        jobs[job] = None
        if len(jobs) > MAX_JOBS:
            raise ValueError(f"more than {MAX_JOBS} jobs")
    return tuple(jobs)


def _allocations(name: str, jobs: Sequence[str], gpus: Sequence[Gpu]) -> Iterator[Allocation]:
    """Raises ValueError for a device this machine has not got."""
    index, _, instance = name.partition(".")
    gpu = next((gpu for gpu in gpus if gpu.index == int(index)), None)
    if gpu is None:
        if jobs:
            raise ValueError("no such GPU here")
        return
    mig_uuid = ""
    if instance:
        mig_uuid = next((mig.uuid for mig in gpu.mig if mig.gi == int(instance)), "")
        if not mig_uuid:
            raise ValueError("no such GPU instance here")
    for job in jobs:
        holder = Holder(kind="slurm", uid=job, name=f"job {job}")
        yield Allocation(gpu.uuid, holder, mig_uuid, sharing="processes" if len(jobs) > 1 else None)
