"""Which jobs hold which GPUs, from the folder that a batch system's prolog keeps for dcgm-exporter.

One file per GPU, named by its index (`0`) or, for a MIG instance, by index and GPU instance (`0.1`); one job id
per line. Source: dcgm-exporter, DCGM_HPC_JOB_MAPPING_DIR. Jobs of one file share its device equally, as
nothing there says otherwise. The folder is read anew with every reading, bounded. A GPU without a file has no job.
A file that cannot be read or understood says nothing: its GPU keeps the jobs that were read last, and its holders are
unknown until the file can be read again. Without the folder that is so for every GPU.
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
MAX_FAULTS = 8
"""So many faults are named; of the others their number."""
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\[\]+-]{0,63}")


class HpcJobs:
    """Who holds what by the mapping folder; shaped like `agent.pods.PodsFile`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._last: dict[str, tuple[Allocation, ...]] = {}
        """What each file said when it could be read last."""

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Pods:  # noqa: ARG002 - the folder has no times
        """What the folder says now."""
        try:
            with os.scandir(self._root) as entries:
                names = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name))
        except OSError as error:
            fault = f"{self._root}: {error.strerror}"
            return Pods((), self._held(gpus), fault, unknown={gpu.uuid: fault for gpu in gpus})
        faults: list[str] = []
        unknown: dict[str, str] = {}
        unresolved: list[str] = []
        self._last = {name: held for name, held in self._last.items() if name in names}
        for number, name in enumerate(names):
            try:
                if number >= MAX_FILES:
                    raise ValueError(f"not read: the folder has more than {MAX_FILES} files")
                self._last[name] = tuple(_allocations(name, self._jobs(name), gpus))
            except FileNotFoundError:  # its last job ended since the folder was listed
                self._last.pop(name, None)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                fault = f"{self._root / name}: {reason}"
                faults.append(fault)
                if (gpu := _gpu(name, gpus)) is not None:
                    unknown.setdefault(gpu.uuid, fault)
                if isinstance(error, _NoInstance):
                    unresolved.append(name)
        return Pods((), self._held(gpus), _joined(faults), unresolved=tuple(unresolved), unknown=unknown)

    def _held(self, gpus: Sequence[Gpu]) -> tuple[Allocation, ...]:
        """What the files said last, of the devices that there are."""
        devices = {(gpu.uuid, "") for gpu in gpus} | {(gpu.uuid, mig.uuid) for gpu in gpus for mig in gpu.mig}
        held = (allocation for name in sorted(self._last) for allocation in self._last[name])
        return tuple(allocation for allocation in held if (allocation.gpu_uuid, allocation.mig_uuid) in devices)

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


class _NoInstance(ValueError):
    """A file names a MIG instance that is not known: perhaps it is new."""


def _joined(faults: Sequence[str]) -> str:
    more = len(faults) - MAX_FAULTS
    return "; ".join([*faults[:MAX_FAULTS], *([f"{more} more files"] if more > 0 else [])])


def _gpu(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """The GPU of a file."""
    index = int(name.partition(".")[0])
    return next((gpu for gpu in gpus if gpu.index == index), None)


def _allocations(name: str, jobs: Sequence[str], gpus: Sequence[Gpu]) -> Iterator[Allocation]:
    """Raises ValueError for a device that this machine has not got."""
    gpu, instance = _gpu(name, gpus), name.partition(".")[2]
    if gpu is None:
        if jobs:
            raise ValueError("no such GPU here")
        return
    mig_uuid = ""
    if instance and jobs:
        mig_uuid = next((mig.uuid for mig in gpu.mig if mig.gi == int(instance)), "")
        if not mig_uuid:
            raise _NoInstance("no such GPU instance here")
    for job in jobs:
        holder = Holder(kind="slurm", uid=job, name=f"job {job}")
        yield Allocation(gpu.uuid, holder, mig_uuid, sharing="processes" if len(jobs) > 1 else None)
