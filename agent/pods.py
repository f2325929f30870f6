"""Which pods hold which GPUs of this node, from a YAML file: for clusters without an API server, and tests.

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
        created: 2026-10-01T08:00:00Z                 # likewise scheduled, started, ended; all optional
        devices:
          - gpu: GPU-2f6c...                          # uuid, or the index on this node
            mig: MIG-91e0...                          # where it holds an instance
            container: main
            sharing: time-slicing                     # or mps, fraction, dra
            of: 4                                     # replicas the device is cut into ...
            replicas: 1                               # ... of which it has this many
            fraction: 0.5                             # for fraction and dra

A pod holds its devices from `started` (else `scheduled`, else always) to `ended`. The file is read
again when it changes; a fault leaves the last good reading in force and is reported with file:line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.model import Allocation, Gpu, Unavailable
from agent.wholefile import stamp
from agent.wire import Holder, Owner, PodFacts, SharingMode
from agent.yamlfile import Document, FileFault, Key, convert, read

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
    """A pod as it should be called. containers: the names of its containers by the runtime's ids."""

    uid: str
    namespace: str
    name: str
    containers: Mapping[str, str] = field(default_factory=dict)

    def called(self, holder: Holder) -> Holder:
        """The holder a control group names, as everybody else calls it; a container it does not know stays an id."""
        names = [name for long_id, name in self.containers.items() if long_id.startswith(holder.container)]
        container = names[0] if len(names) == 1 else holder.container
        return Holder(kind="pod", uid=self.uid, namespace=self.namespace, name=self.name, container=container)


@dataclass(frozen=True, slots=True)
class Pods:
    """One reading: facts of every pod, and what the running ones hold (Unavailable: nobody could say).
    fault: why the file was not taken. sources: where it came from, each with its failure. known: pods by
    what a control group may call them: their uid, and a static pod's configuration hash.
    took_ms: how long those took that are timed. unresolved: devices that are held and not among those asked for.
    unknown: why it is not known who holds a GPU, by its uuid; its allocations are the last known ones."""

    facts: tuple[PodFacts, ...]
    allocations: tuple[Allocation, ...] | Unavailable
    fault: str = ""
    sources: tuple[tuple[str, str], ...] = ()
    known: Mapping[str, KnownPod] = field(default_factory=dict)
    took_ms: tuple[tuple[str, int], ...] = ()
    unresolved: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


class PodsFile:
    """See the module's text. Raises FileFault at the first reading only: later ones keep the last good file."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._pods = _parse(read(path))
        self._stamp = stamp(path)
        self._fault = ""

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Pods:
        """What holds at `at_ms`. An index in the file is looked up among `gpus`."""
        found = stamp(self._path)
        if found != self._stamp:
            self._stamp = found
            try:
                self._pods, self._fault = _parse(read(self._path)), ""
            except FileFault as fault:
                self._fault = "; ".join(fault.faults)
        uuids = {str(gpu.index): gpu.uuid for gpu in gpus}
        facts = tuple(self._facts(pod, at_ms) for pod in self._pods)
        held = tuple(
            _allocation(pod, device, uuids) for pod in self._pods if _holds(pod, at_ms) for device in pod.devices
        )
        return Pods(facts, held, self._fault)

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
    """Raises FileFault with the line of every fault."""
    if document.data is None:
        return ()
    pods = convert(document, _File).pods
    faults: list[str] = []
    seen: dict[str, int] = {}
    for index, pod in enumerate(pods):
        for path, reason in _contradictions(pod):
            faults.append(f"{document.place(('pods', index, *path))}: {reason}")
        if pod.uid in seen:
            faults.append(f"{document.place(('pods', index, 'uid'))}: pod {pod.uid} is item {seen[pod.uid]} already")
        seen[pod.uid] = index
    if faults:
        raise FileFault(faults)
    return pods


def _contradictions(pod: _Pod) -> Iterator[tuple[tuple[Key, ...], str]]:
    """What no single type can say, each with its path inside the pod."""
    for name in ("created", "scheduled", "started", "ended"):
        at = getattr(pod, name)
        if at is not None and at.tzinfo is None:
            yield (name,), f"{name}: an instant needs its offset, for example 2026-10-01T08:00:00Z"
    for index, device in enumerate(pod.devices):
        place = ("devices", index)
        if device.fraction is not None and not 0 < device.fraction <= 1:
            yield (*place, "fraction"), f"fraction: more than 0 and at most 1, not {device.fraction}"
        if device.of is not None and device.replicas > device.of:
            yield (*place, "replicas"), f"replicas: {device.replicas} of {device.of}"
        if device.sharing is None and (device.of is not None or device.fraction is not None):
            yield place, "sharing: missing, although the device is said to be shared"


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
