"""Reads a simulated node and its events from a YAML file.

```yaml
start_ms: 1790812800000    # what `after_ms` counts from; left out: when the agent starts
per_holder: true           # false: only devices (and MIG instances) can be read, not their holders
gpus:
  - {model: H100}                                        # uuid GPU-<node>-0 unless given
  - {model: A100, uuid: GPU-a, mig: [3g.40gb, 2g.20gb, 1g.10gb]}
events:                    # each has `at_ms` (UTC) or `after_ms`, and exactly one of:
  - {after_ms: 0,     place: {gpu: 0, namespace: vision, pod: train-0, utilisation_ppm: 900000,
                              memory_mib: 60000, queue_ref: "policy:vision", labels: {app: train}}}
  - {after_ms: 0,     place: {gpu: 1, mig: 2, namespace: nlp, pod: notebook, utilisation_ppm: 20000}}
  - {after_ms: 5000,  utilisation: {pod: train-0, ppm: 400000}}
  - {after_ms: 9000,  remove: train-0}
  - {after_ms: 9500,  stray: {gpu: 0, ppm: 100000}}      # a process without an allocation of the GPU
  - {after_ms: 10000, lose: 0}                           # the GPU falls off the bus
  - {after_ms: 12000, recover: 0}
  - {after_ms: 13000, reset: 0}                          # its counters start again
  - {after_ms: 13500, remove: notebook}
  - {after_ms: 13500, repartition: {gpu: 1, mig: [7g.80gb]}}
  - {after_ms: 14000, holders: kubelet gone}             # holders are unknown ("": known again)
  - {after_ms: 15000, offline: true}                     # the node is down (false: up again)
```

GPUs and MIG instances are named by their position, holders by their `uid` (default: the pod's name). `place` also takes
`container`, `kind`, and of a shared GPU either `replicas` of `of_replicas` with `sharing` (default time-slicing) or
`fraction_ppm`. A fault of the file is reported with file:line. To find impossible events, `load_scenario` applies all
events to a separate node first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from agent.core.readings import Allocation
from agent.simulation.simulated_node import MODELS, SimulatedEvent, SimulatedNode, SimulatedSource, make_gpu
from agent.wire import Holder, HolderKind, PodFacts, SharingMode
from gputally.base.yaml_file import Document, FileFault, convert, read


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Gpu(_Struct, frozen=True, kw_only=True):
    model: str
    uuid: str = ""
    mig: tuple[str, ...] = ()


class _Place(_Struct, frozen=True, kw_only=True):
    gpu: int
    pod: str
    mig: int | None = None
    namespace: str = ""
    uid: str = ""
    container: str = "main"
    kind: HolderKind = "pod"
    utilisation_ppm: int = 0
    memory_mib: int = 0
    sharing: SharingMode | None = None
    replicas: int = 1
    of_replicas: int = 0
    fraction_ppm: int | None = None
    queue_ref: str = ""
    workload: str = ""
    labels: dict[str, str] = {}


class _Utilisation(_Struct, frozen=True, kw_only=True):
    pod: str
    ppm: int


class _StrayProcess(_Struct, frozen=True, kw_only=True):
    gpu: int
    ppm: int


class _MigChange(_Struct, frozen=True, kw_only=True):
    gpu: int
    mig: tuple[str, ...] = ()


class _Event(_Struct, frozen=True, kw_only=True):
    at_ms: int | None = None
    after_ms: int | None = None
    place: _Place | None = None
    remove: str | None = None
    utilisation: _Utilisation | None = None
    stray: _StrayProcess | None = None
    lose: int | None = None
    recover: int | None = None
    reset: int | None = None
    repartition: _MigChange | None = None
    holders: str | None = None
    offline: bool | None = None


_ACTIONS = tuple(name for name in _Event.__struct_fields__ if not name.endswith("_ms"))


class _Scenario(_Struct, frozen=True, kw_only=True):
    gpus: tuple[_Gpu, ...]
    events: tuple[_Event, ...] = ()
    start_ms: int | None = None
    per_holder: bool = True


def load_scenario(path: Path, node: str, now_ms: int) -> SimulatedSource:
    """Return the source that a scenario file describes. Raises FileFault.

    node: the name of the node.
    now_ms: the present time in UTC milliseconds. The times `after_ms` count from it if the file has no `start_ms`."""
    document = read(path)
    scenario = convert(document, _Scenario)
    origin_ms = now_ms if scenario.start_ms is None else scenario.start_ms
    events = _events(document, scenario, origin_ms, node)
    first_ms = min([origin_ms, now_ms, *(event.at_ms for _, event in events)])
    _apply_all(document, events, _node(document, scenario, node, first_ms))
    return SimulatedSource(_node(document, scenario, node, first_ms), [event for _, event in events])


def _node(document: Document, scenario: _Scenario, name: str, start_ms: int) -> SimulatedNode:
    gpus = []
    for index, gpu in enumerate(scenario.gpus):
        if gpu.model not in MODELS:
            place = document.place(("gpus", index, "model"))
            raise FileFault([f"{place}: unknown GPU model {gpu.model!r} (known: {', '.join(MODELS)})"])
        try:
            gpus.append(make_gpu(gpu.uuid or f"GPU-{name}-{index}", index, MODELS[gpu.model], gpu.mig))
        except ValueError as error:
            raise FileFault([f"{document.place(('gpus', index, 'mig'))}: {error}"]) from error
    if len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise FileFault([f"{document.place(('gpus',))}: two GPUs have the same uuid"])
    return SimulatedNode(name, gpus, start_ms=start_ms, per_holder=scenario.per_holder)


def _events(document: Document, scenario: _Scenario, origin_ms: int, node: str) -> list[tuple[int, SimulatedEvent]]:
    """Return the events in the order of their times, each with its position in the file."""
    faults = []
    events = []
    for index, event in enumerate(scenario.events):
        place = document.place(("events", index))
        actions = [name for name in _ACTIONS if getattr(event, name) is not None]
        if len(actions) != 1:
            faults.append(f"{place}: an event needs exactly one of {', '.join(_ACTIONS)}; this one has {len(actions)}")
            continue
        if event.at_ms is not None and event.after_ms is None:
            at_ms = event.at_ms
        elif event.after_ms is not None and event.at_ms is None:
            at_ms = origin_ms + event.after_ms
        else:
            faults.append(f"{place}: an event needs either at_ms or after_ms")
            continue
        events.append((index, SimulatedEvent(at_ms, _action(event, at_ms, node))))
    if faults:
        raise FileFault(faults)
    return sorted(events, key=lambda placed: placed[1].at_ms)


def _apply_all(document: Document, events: Sequence[tuple[int, SimulatedEvent]], node: SimulatedNode) -> None:
    for index, event in events:
        try:
            event.apply(node)
        except ValueError as error:
            raise FileFault([f"{document.place(('events', index))}: {error}"]) from error


def _uuid(node: SimulatedNode, gpu: int) -> str:
    if not 0 <= gpu < len(node.gpus):
        raise ValueError(f"no GPU {gpu}: the node has {len(node.gpus)}")
    return node.gpus[gpu].uuid


def _action(event: _Event, at_ms: int, name: str) -> Callable[[SimulatedNode], None]:
    """Return a function that applies one event to a node.

    name: the name of the node, for the facts of pods."""

    def apply(node: SimulatedNode) -> None:
        if event.place is not None:
            _place(node, event.place, at_ms, name)
        elif event.remove is not None:
            node.remove(at_ms, event.remove)
        elif event.utilisation is not None:
            node.set_utilisation(at_ms, event.utilisation.pod, event.utilisation.ppm)
        elif event.stray is not None:
            node.set_stray(at_ms, _uuid(node, event.stray.gpu), event.stray.ppm)
        elif event.lose is not None:
            node.lose(at_ms, _uuid(node, event.lose))
        elif event.recover is not None:
            node.recover(at_ms, _uuid(node, event.recover))
        elif event.reset is not None:
            node.reset_counters(at_ms, _uuid(node, event.reset))
        elif event.repartition is not None:
            node.repartition(at_ms, _uuid(node, event.repartition.gpu), event.repartition.mig)
        elif event.holders is not None:
            node.set_holders_unavailable(at_ms, event.holders)
        elif event.offline is not None:
            node.set_offline(at_ms, event.offline)

    return apply


def _place(node: SimulatedNode, place: _Place, at_ms: int, name: str) -> None:
    uuid = _uuid(node, place.gpu)
    instances = node.gpus[place.gpu].mig
    if place.mig is not None and not 0 <= place.mig < len(instances):
        raise ValueError(f"no MIG instance {place.mig}: GPU {place.gpu} has {len(instances)}")
    uid = place.uid or place.pod
    sharing = place.sharing or ("time-slicing" if place.of_replicas else "fraction" if place.fraction_ppm else None)
    allocation = Allocation(
        gpu_uuid=uuid,
        holder=Holder(place.kind, uid, place.namespace, place.pod, place.container),
        mig_uuid="" if place.mig is None else instances[place.mig].uuid,
        sharing=sharing,
        sharing_replicas=place.of_replicas,
        replicas=place.replicas,
        fraction_ppm=place.fraction_ppm,
    )
    facts = None
    if place.kind == "pod":
        facts = PodFacts(
            seq=0,
            uid=uid,
            namespace=place.namespace,
            name=place.pod,
            node=name,
            labels=place.labels,
            workload=place.workload,
            queue_ref=place.queue_ref,
            created_ms=at_ms,
            scheduled_ms=at_ms,
            observed_ms=at_ms,
        )
    node.place(at_ms, allocation, place.utilisation_ppm, place.memory_mib, facts)
