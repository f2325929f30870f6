"""Lets a source of holders of another package stop nothing: its calls are guarded, and what it returns is checked.

A source speaks of the GPUs of this node and of pods on it, of nothing else. If it raises, hangs or returns something
else, its failure is named, and all holders are unknown: nobody's time is booked as unheld."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec

from agent.core.guarded_calls import MOST_LOADING_S, MOST_READING_S, MOST_TEXT, GuardedCalls
from agent.core.readings import Allocation, Gpu, Unavailable
from agent.holders.protocol import HolderSource, Holdings
from agent.wire import PodFacts
from gputally.base.errors import AgentError
from gputally.base.pod_stop import PodStop, bounded
from gputally.base.untrusted_text import LONGEST_NAME, LONGEST_REFERENCE, UNDECODABLE, escaped, is_name

log = logging.getLogger("agent.holders.guard")

MOST_ALLOCATIONS, MOST_PODS, MOST_LABELS = 4_096, 1_024, 64
MOST_REPLICAS = 1_024
LONGEST_KEY = LONGEST_NAME + 64
"""The longest key of a label in Kubernetes, `PREFIX/NAME`."""
_PPM = 1_000_000
_MOST_MS = 2**53


class WrongHoldings(AgentError):
    """A source returned what are no holders of this node."""


class GuardedSource:
    """A `HolderSource` around one of another package. open_source: opens it; it is tried again if it fails."""

    def __init__(
        self,
        name: str,
        node: str,
        open_source: Callable[[], HolderSource],
        *,
        most_s: float = MOST_READING_S,
        most_opening_s: float = MOST_LOADING_S,
    ) -> None:
        self._calls = GuardedCalls(name, open_source, log, most_s, most_opening_s)
        self._node = node

    def open(self) -> None:
        """Open the source. Raises SettingsError alone; another failure is told by the next readings."""
        self._calls.open()

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Holdings:
        """Return what the source returns, or why nothing is known."""
        found = self._calls.ask(at_ms, lambda source: checked(source.read(at_ms, gpus), gpus, self._node))
        if found is None:
            return Holdings((), Unavailable(self._calls.failure), self._calls.failure)
        fault = found.fault or (found.allocations.reason if isinstance(found.allocations, Unavailable) else "")
        self._calls.tell(fault)
        return found

    def close(self) -> None:
        """Close the source, if it answers."""
        self._calls.close()


def checked(found: Any, gpus: Sequence[Gpu], node: str) -> Holdings:
    """Return the holders of a node, as far as a source may speak of them. Raises WrongHoldings for whatever else."""
    if not isinstance(found, Holdings):
        raise WrongHoldings(f"read returned the type {type(found).__name__}, not Holdings")
    devices = {(gpu.uuid, "") for gpu in gpus} | {(gpu.uuid, part.uuid) for gpu in gpus for part in gpu.mig}
    uuids = {gpu.uuid for gpu in gpus}
    unknown = {
        uuid: _line(why) or "the source is not sure" for uuid, why in dict(found.unknown).items() if uuid in uuids
    }
    unresolved = [_line(name) for name in found.unresolved[:MOST_PODS]]
    allocations: tuple[Allocation, ...] | Unavailable
    if isinstance(found.allocations, Unavailable):
        allocations = Unavailable(_line(found.allocations.reason) or "the source does not say why")
    else:
        every = [_allocation(one) for one in _at_most(found.allocations, MOST_ALLOCATIONS, "allocations")]
        allocations = tuple(one for one in every if (one.gpu_uuid, one.mig_uuid) in devices)
        if len({(one.gpu_uuid, one.mig_uuid, one.holder) for one in allocations}) < len(allocations):
            raise WrongHoldings("a holder has a device twice; several parts are `replicas`")
        free = uuids - {one.gpu_uuid for one in allocations}
        for one in every:
            if (one.gpu_uuid, one.mig_uuid) not in devices:
                name = one.mig_uuid or one.gpu_uuid
                unresolved.append(name)
                elsewhere = one.gpu_uuid.startswith("GPU-")  # a GPU that the driver does not list
                for uuid in {one.gpu_uuid} if one.gpu_uuid in uuids else () if elsewhere else free:
                    unknown.setdefault(uuid, f"{name} is held and is no known device: it may be this GPU or part of it")
    facts = tuple(_facts(one, node) for one in _at_most(found.facts, MOST_PODS, "pods"))
    if len({one.uid for one in facts}) < len(facts):
        raise WrongHoldings("a pod is listed twice")
    _check_owners(allocations, facts)
    fault = _line(found.fault)
    if unresolved and not fault:
        fault = f"no GPU here is called {', '.join(unresolved[:3])}"
    return Holdings(facts, allocations, fault, unresolved=tuple(dict.fromkeys(unresolved)), unknown=unknown)


def _check_owners(allocations: Sequence[Allocation] | Unavailable, facts: Sequence[PodFacts]) -> None:
    """Check that whoever holds devices is billed to one namespace, and a pod to its own."""
    billed = {one.uid: one.namespace for one in facts}
    for one in () if isinstance(allocations, Unavailable) else allocations:
        holder = one.holder
        first = billed.setdefault(holder.uid, holder.namespace)
        if first != holder.namespace:
            names = f"{_line(first)!r} and {_line(holder.namespace)!r}"
            raise WrongHoldings(f"holder {_line(holder.uid)} is in two namespaces, {names}")


def _line(text: object) -> str:
    return escaped(str(text))[:MOST_TEXT]


def _at_most(items: Any, most: int, what: str) -> Sequence[Any]:
    if not isinstance(items, tuple | list) or len(items) > most:
        raise WrongHoldings(f"{what} are no tuple of at most {most}")
    return items


def _allocation(found: object) -> Allocation:
    try:
        allocation = msgspec.convert(msgspec.to_builtins(found), Allocation)
    except UNDECODABLE as error:
        raise WrongHoldings(f"the type {type(found).__name__} is no Allocation: {error}") from error
    where = f"holder {_line(allocation.holder.uid)}"
    holder = allocation.holder
    texts = (allocation.gpu_uuid, allocation.mig_uuid, holder.uid, holder.namespace, holder.name, holder.container)
    if not holder.uid or not all(len(text) <= MOST_TEXT and (text.isprintable() or not text) for text in texts):
        raise WrongHoldings(f"{where}: a text is one line of at most {MOST_TEXT} characters, and the uid has one")
    if holder.kind == "unattributed" or (holder.kind == "pod" and not (holder.namespace and holder.name)):
        raise WrongHoldings(f"{where}: a holder is a pod with namespace and name, a job, a container or a process")
    if not (1 <= allocation.replicas <= MOST_REPLICAS and 0 <= allocation.sharing_replicas <= MOST_REPLICAS):
        raise WrongHoldings(f"{where}: replicas are from 1 to {MOST_REPLICAS}")
    if allocation.sharing_replicas and allocation.replicas > allocation.sharing_replicas:
        raise WrongHoldings(f"{where}: replicas are more than sharing_replicas")
    if allocation.fraction_ppm is not None and not 0 < allocation.fraction_ppm <= _PPM:
        raise WrongHoldings(f"{where}: fraction_ppm is more than 0 and at most {_PPM}")
    if allocation.sharing is None and (allocation.fraction_ppm is not None or allocation.sharing_replicas):
        raise WrongHoldings(f"{where}: a part of a device needs `sharing`")
    return allocation


def _facts(found: object, node: str) -> PodFacts:
    """Return the facts of a pod. Its labels and requests are its author's: those that no record may have are left
    out. So is what no record may have of the reason of its stop, which quotes others."""
    try:
        plain = msgspec.to_builtins(found)
        kept = {name: _texts(plain[name]) for name in ("labels", "requests")} | {"stop": _stop(plain["stop"])}
        facts = msgspec.convert(plain | kept, PodFacts)
    except (*UNDECODABLE, TypeError, KeyError, AttributeError) as error:
        raise WrongHoldings(f"the type {type(found).__name__} is no PodFacts: {error}") from error
    where = f"pod {_line(facts.uid)}"
    if facts.node != node:
        raise WrongHoldings(f"{where} is on the node {_line(facts.node)}, not on {node}")
    if not (facts.uid and facts.namespace and facts.name):
        raise WrongHoldings(f"{where}: uid, namespace and name have a text")
    names = [facts.uid, facts.namespace, facts.name]
    names += [text for owner in facts.owners for text in (owner.kind, owner.name, owner.uid)]
    if not all(map(is_name, names)) or not all(
        is_name(t, LONGEST_REFERENCE) for t in (facts.workload, facts.queue_ref)
    ):
        raise WrongHoldings(f"{where}: a name is one line of at most {LONGEST_NAME} characters")
    times = facts.created_ms, facts.scheduled_ms, facts.started_ms, facts.ended_ms, facts.observed_ms
    for number in (facts.seq, facts.priority or 0, *(time for time in times if time is not None)):
        if not -(2**31) <= number <= _MOST_MS:
            raise WrongHoldings(f"{where}: {number} is too large")
    return facts


def _stop(stop: Any) -> Any:
    return None if stop is None else msgspec.to_builtins(bounded(PodStop(**stop)))


def _texts(texts: Any) -> dict[str, str]:
    named = ((key, text) for key, text in texts.items() if is_name(key, LONGEST_KEY) and is_name(text))
    return dict(islice(named, MOST_LABELS))
