"""Reads the folder of HPC job files that a batch system's prolog writes, in dcgm-exporter's format.

The folder has one file per GPU, named by the GPU's index (`0`) or, for a MIG instance, by index and
GPU instance (`0.1`), with one job id per line. Source: dcgm-exporter, DCGM_HPC_JOB_MAPPING_DIR. Jobs of one file share
its device equally. `HpcJobs` reads the folder with every reading, but at most 1,024 files; the holders of the other
files' GPUs are unknown. A GPU without a file has no job. If a file cannot be read or is invalid, the jobs that were
read last stay, and the holders of its GPU count as unknown until the file can be read again. If the folder cannot be
read, this applies to every GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.core.readings import Allocation, Gpu
from agent.holders.protocol import HolderPlugin, Holdings
from agent.wire import JOB, Holder

MAX_FILES = 1_024
MAX_FILE_BYTES = 64 * 1024
MAX_JOBS = 256
_NAME = re.compile(r"([0-9]{1,4})(?:\.([0-9]{1,4}))?")
MAX_FAULTS = 8
"""Largest number of faults in a message. The other faults are only counted."""
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\[\]+-]{0,63}")


class HpcJobs:
    """A folder of HPC job files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._allocations: dict[str, tuple[Allocation, ...]] = {}
        """The allocations in each file when it was last read successfully, by the name of the file."""

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Holdings:  # noqa: ARG002 - the folder has no times
        """Read the folder and return the holders. A file's name refers to an index in `gpus`."""
        try:
            with os.scandir(self._root) as entries:
                names = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name))
        except OSError as error:
            fault = f"{self._root}: {error.strerror}"
            return Holdings((), self._present(gpus), fault, unknown={gpu.uuid: fault for gpu in gpus})
        faults: list[str] = []
        unknown: dict[str, str] = {}
        unresolved: list[str] = []
        self._allocations = {name: content for name, content in self._allocations.items() if name in names}
        for number, name in enumerate(names):
            try:
                if number >= MAX_FILES:
                    raise ValueError(f"not read: the folder has more than {MAX_FILES} files")
                self._allocations[name] = tuple(_allocations(name, self._jobs(name), gpus))
            except FileNotFoundError:  # its last job ended since the folder was listed
                self._allocations.pop(name, None)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                fault = f"{self._root / name}: {reason}"
                faults.append(fault)
                if (gpu := _gpu(name, gpus)) is not None:
                    unknown.setdefault(gpu.uuid, fault)
                if isinstance(error, _NoInstance):
                    unresolved.append(name)
        return Holdings((), self._present(gpus), _joined(faults), unresolved=tuple(unresolved), unknown=unknown)

    def close(self) -> None:
        """Holds nothing."""

    def _present(self, gpus: Sequence[Gpu]) -> tuple[Allocation, ...]:
        """Return the last known allocations of devices that exist."""
        devices = {(gpu.uuid, "") for gpu in gpus} | {(gpu.uuid, mig.uuid) for gpu in gpus for mig in gpu.mig}
        ordered = (allocation for name in sorted(self._allocations) for allocation in self._allocations[name])
        return tuple(allocation for allocation in ordered if (allocation.gpu_uuid, allocation.mig_uuid) in devices)

    def _jobs(self, name: str) -> tuple[str, ...]:
        """Return the jobs in a file. Raises OSError, and ValueError for an invalid list of jobs."""
        with (self._root / name).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"the file is larger than {MAX_FILE_BYTES} bytes")
        return parse_jobs(text.decode("utf-8", "replace"))


def parse_jobs(text: str) -> tuple[str, ...]:
    """Return the job ids of one file, each once, in order. Raises ValueError for an invalid line."""
    jobs: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        job = line.strip()
        if not job:
            continue
        if not _JOB.fullmatch(job):
            raise ValueError(f"line {number}: {job[:64]!r} is not a job id")
        jobs[job] = None
        if len(jobs) > MAX_JOBS:
            raise ValueError(f"the file names more than {MAX_JOBS} jobs")
    return tuple(jobs)


class _NoInstance(ValueError):
    """The name of a file refers to an unknown MIG instance, which may have been created since the GPUs were listed."""


def _joined(faults: Sequence[str]) -> str:
    more = len(faults) - MAX_FAULTS
    return "; ".join([*faults[:MAX_FAULTS], *([f"{more} more files"] if more > 0 else [])])


def _gpu(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU to which the name of a file refers; None if there is none."""
    index = int(name.partition(".")[0])
    return next((gpu for gpu in gpus if gpu.index == index), None)


def _allocations(name: str, jobs: Sequence[str], gpus: Sequence[Gpu]) -> Iterator[Allocation]:
    """Yield the allocations of the jobs in one file. Raises ValueError if this machine does not have the device."""
    gpu, instance = _gpu(name, gpus), name.partition(".")[2]
    if gpu is None:
        if jobs:
            raise ValueError("this node has no such GPU")
        return
    mig_uuid = ""
    if instance and jobs:
        mig_uuid = next((mig.uuid for mig in gpu.mig if mig.gi == int(instance)), "")
        if not mig_uuid:
            raise _NoInstance("this GPU has no such GPU instance")
    for job in jobs:
        holder = Holder(kind=JOB, uid=job, name=f"job {job}")
        yield Allocation(gpu.uuid, holder, mig_uuid, sharing="processes" if len(jobs) > 1 else None)


HOLDERS = HolderPlugin(
    name="jobs",
    place="the folder of HPC job files",
    open=lambda place, _node: HpcJobs(Path(place)),
    reaches="reads the files of the folder",
    page="docs/attribution.md",
)
