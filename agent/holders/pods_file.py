"""Reads who holds GPUs from a pods file.

    pods:
      - uid: 5f0ce1b2-7a41-4c0e-9d55-0123456789ab    # required, like namespace and name
        namespace: vision
        name: train-0
        labels: {team: vision}
        owners: [{kind: Job, name: train, uid: 7c1d}]
        workload: Job/train                           # default: the last owner
        queue_ref: policy:vision
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
holders in the last valid version stay, and count as unknown until the file is valid again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.core.readings import Allocation, Gpu
from agent.holders.protocol import HolderPlugin, Holdings
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


class PodsFile:
    """A pods file, which is read again when it changes. The constructor raises FileFault for an invalid file. If a
    later version is invalid, the last valid version stays in use."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._pods = _parse(read(path))
        self._stamp = stamp(path)
        self._fault = ""

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Holdings:
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
        unknown = {gpu.uuid: self._fault for gpu in gpus} if self._fault else {}
        return Holdings(facts, allocations, self._fault, unknown=unknown)

    def close(self) -> None:
        """Holds nothing."""

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


HOLDERS = HolderPlugin(
    name="pods",
    place="the pods file",
    open=lambda place, node: PodsFile(Path(place), node.node),
    reaches="reads the file",
    page="docs/attribution.md",
)
