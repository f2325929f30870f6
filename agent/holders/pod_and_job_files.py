"""Reads who holds GPUs from a pods file, or from the HPC job files that a batch system's prolog writes.

    pods:
      - uid: 5f0ce1b2-7a41-4c0e-9d55-0123456789ab    # required, like namespace and name
        namespace: vision
        name: train-0
        labels: {team: vision}
        owners: [{kind: Job, name: train, uid: 7c1d}]
        workload: Job/train                           # default: the last owner
        queue_ref: kai:vision
        priority: 100
        requests: {nvidia.com/gpu: "1"}
        created: 2026-10-01T08:00:00Z                 # also scheduled, started, ended; all optional
        devices:
          - gpu: GPU-2f6c...                          # uuid, or the index on this node
            mig: MIG-91e0...                          # only for a MIG instance
            container: main
            sharing: time-slicing                     # or mps, fraction, dra
            of: 4                                     # replicas the device is cut into ...
            replicas: 1                               # ... of which it has this many
            fraction: 0.5                             # for fraction and dra

A pod holds its devices from `started` to `ended`. Without `started` it holds them from `scheduled`, and without both
from the beginning. `PodsFile` reads the file again when it changes. After a fault, which it reports with file:line, the
last valid version stays in use.

The folder of HPC job files has one file per GPU, named by the GPU's index (`0`) or, for a MIG instance, by index and
GPU instance (`0.1`), with one job id per line. Source: dcgm-exporter, DCGM_HPC_JOB_MAPPING_DIR. Jobs of one file share
its device equally. `HpcJobs` reads the folder with every reading, but at most 1,024 files; the holders of the other
files' GPUs are unknown. A GPU without a file has no job. If a file cannot be read or is invalid, the jobs that were
read last stay, and the holders of its GPU count as unknown until the file can be read again. If the folder cannot be
read, this applies to every GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.core.readings import Allocation, Gpu, Unavailable
from agent.wire import Holder, Owner, PodFacts, SharingMode
from gputally.base.atomic_file import stamp
from gputally.base.yaml_file import Document, FileFault, Key, convert, read

_PPM = 1_000_000
Name = Annotated[str, Meta(min_length=1, max_length=253)]
Count = Annotated[int, Meta(ge=1, le=1024)]


class _Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: str | int
    mig: str = ""
    container: str = ""
    sharing: SharingMode | None = None
    of: Count | None = None
    replicas: Count = 1
    fraction: Decimal | None = None


class _Pod(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uid: Name
    namespace: Name
    name: Name
    labels: dict[str, str] = {}
    owners: tuple[Owner, ...] = ()
    workload: str = ""
    queue_ref: str = ""
    priority: int | None = None
    requests: dict[str, str] = {}
    created: datetime | None = None
    scheduled: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    devices: tuple[_Device, ...] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pods: tuple[_Pod, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownPod:
    """A pod that the API server lists. containers: the names of its containers, by the container runtime's ids."""

    uid: str
    namespace: str
    name: str
    containers: Mapping[str, str] = field(default_factory=dict)

    def named_holder(self, holder: Holder) -> Holder:
        """Return the holder of a control group with the names of the pod and the container. An unknown container keeps
        its id as its name."""
        names = [name for long_id, name in self.containers.items() if long_id.startswith(holder.container)]
        container = names[0] if len(names) == 1 else holder.container
        return Holder(kind="pod", uid=self.uid, namespace=self.namespace, name=self.name, container=container)


@dataclass(frozen=True, slots=True)
class Pods:
    """One reading of the pods of a node.

    facts: the facts of the pods.
    allocations: the devices of the running pods; Unavailable if unknown.
    fault: why the newest version of a file is not in use; "" if it is, or if there is no file.
    sources: each source with its failure, which is "" if the source answered.
    known: the pods that the API server lists, by the id in their control groups.
    took_ms: durations of the timed sources in milliseconds.
    unresolved: allocated devices that this node does not have.
    unknown: why the holders of a GPU are unknown, by the GPU's uuid; its allocations are the last known ones."""

    facts: tuple[PodFacts, ...]
    allocations: tuple[Allocation, ...] | Unavailable
    fault: str = ""
    sources: tuple[tuple[str, str], ...] = ()
    known: Mapping[str, KnownPod] = field(default_factory=dict)
    took_ms: tuple[tuple[str, int], ...] = ()
    unresolved: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


class PodsFile:
    """A pods file, which is read again when it changes. The constructor raises FileFault for an invalid file. If a
    later version is invalid, the last valid version stays in use."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._pods = _parse(read(path))
        self._stamp = stamp(path)
        self._fault = ""

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Pods:
        """Return the holders at `at_ms`. An index in the file refers to `gpus`."""
        current = stamp(self._path)
        if current != self._stamp:
            self._stamp = current
            try:
                self._pods, self._fault = _parse(read(self._path)), ""
            except FileFault as fault:
                self._fault = "; ".join(fault.faults)
        uuids = {str(gpu.index): gpu.uuid for gpu in gpus}
        facts = tuple(self._facts(pod, at_ms) for pod in self._pods)
        allocations = tuple(
            _allocation(pod, device, uuids) for pod in self._pods if _holds(pod, at_ms) for device in pod.devices
        )
        return Pods(facts, allocations, self._fault)

    def _facts(self, pod: _Pod, at_ms: int) -> PodFacts:
        outermost = f"{pod.owners[-1].kind}/{pod.owners[-1].name}" if pod.owners else ""
        return PodFacts(
            seq=0,
            uid=pod.uid,
            namespace=pod.namespace,
            name=pod.name,
            node=self._node,
            labels=pod.labels,
            owners=pod.owners,
            workload=pod.workload or outermost,
            queue_ref=pod.queue_ref,
            priority=pod.priority,
            requests=pod.requests,
            created_ms=_ms(pod.created),
            scheduled_ms=_ms(pod.scheduled),
            started_ms=_ms(pod.started),
            ended_ms=_ms(pod.ended),
            observed_ms=at_ms,
        )


def _parse(document: Document) -> tuple[_Pod, ...]:
    """Return the pods in the file. Raises FileFault with the line of every fault."""
    if document.data is None:
        return ()
    pods = convert(document, _File).pods
    faults: list[str] = []
    items: dict[str, int] = {}
    for index, pod in enumerate(pods):
        for path, reason in _contradictions(pod):
            faults.append(f"{document.place(('pods', index, *path))}: {reason}")
        if pod.uid in items:
            faults.append(f"{document.place(('pods', index, 'uid'))}: pod {pod.uid} is already item {items[pod.uid]}")
        items[pod.uid] = index
    if faults:
        raise FileFault(faults)
    return pods


def _contradictions(pod: _Pod) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Yield the faults that the types of the fields cannot express, each with its path inside the pod."""
    for name in ("created", "scheduled", "started", "ended"):
        at = getattr(pod, name)
        if at is not None and at.tzinfo is None:
            yield (name,), f"{name}: the time has no offset from UTC; write for example 2026-10-01T08:00:00Z"
    for index, device in enumerate(pod.devices):
        place = ("devices", index)
        if device.fraction is not None and not 0 < device.fraction <= 1:
            yield (*place, "fraction"), f"fraction: must be more than 0 and at most 1, not {device.fraction}"
        if device.of is not None and device.replicas > device.of:
            yield (*place, "replicas"), f"replicas: {device.replicas} is more than `of`, {device.of}"
        if device.sharing is None and (device.of is not None or device.fraction is not None):
            yield place, "sharing: missing; `of` and `fraction` need it"


def _holds(pod: _Pod, at_ms: int) -> bool:
    since, until = _ms(pod.started or pod.scheduled), _ms(pod.ended)
    return (since is None or since <= at_ms) and (until is None or at_ms < until)


def _allocation(pod: _Pod, device: _Device, uuids: dict[str, str]) -> Allocation:
    return Allocation(
        gpu_uuid=uuids.get(str(device.gpu), str(device.gpu)),
        holder=Holder(kind="pod", uid=pod.uid, namespace=pod.namespace, name=pod.name, container=device.container),
        mig_uuid=device.mig,
        sharing=device.sharing,
        sharing_replicas=device.of or 0,
        replicas=device.replicas,
        fraction_ppm=None if device.fraction is None else int(device.fraction * _PPM),
    )


def _ms(at: datetime | None) -> int | None:
    return None if at is None else round(at.timestamp() * 1000)


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

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Pods:  # noqa: ARG002 - the folder has no times
        """Read the folder and return the holders. A file's name refers to an index in `gpus`."""
        try:
            with os.scandir(self._root) as entries:
                names = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name))
        except OSError as error:
            fault = f"{self._root}: {error.strerror}"
            return Pods((), self._present(gpus), fault, unknown={gpu.uuid: fault for gpu in gpus})
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
        return Pods((), self._present(gpus), _joined(faults), unresolved=tuple(unresolved), unknown=unknown)

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
        holder = Holder(kind="slurm", uid=job, name=f"job {job}")
        yield Allocation(gpu.uuid, holder, mig_uuid, sharing="processes" if len(jobs) > 1 else None)
