"""Watches the objects that determine the queues of pods.

A pod need not have a queue label. Some schedulers store the queue in the object of a gang by which they place its pods,
so for pods of the same scheduler this object takes precedence over labels (`gputally.kubernetes.pod_queue_labels`).
Queues that no other object leads are not watched, because references use their names.

A queue that pods name may belong to a queue of the whole cluster, and this one to groups of queues, and a policy may
name any of them (`QueueLevels`). What is above the queue is therefore a part of the pod's reference. The workload of
the pod's owner says which queue admitted it. Kinds that the cluster does not serve are skipped, and tried again
later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from accountant.inventory.pod_facts import PodSighting, group_keys
from accountant.inventory.pod_owners import Chain
from gputally.kubernetes.list_watch import Metadata, Reflector, _Object
from gputally.kubernetes.objects import Api
from gputally.kubernetes.pod_queue_labels import LedQueues, groups_with_queue, led_queues, queue_ref, with_levels

_Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(_Fields | None)
_text = msgspec.json.Decoder(str | None)


class QueueObject(_Object, frozen=True):
    """An object that names a queue, or what is above one. Of its fields only those are read that a manifest names."""

    metadata: Metadata
    spec: _Fields = {}  # noqa: RUF012 - msgspec copies a default
    status: _Fields = {}  # noqa: RUF012

    def text(self, path: str) -> str:
        """The text at a path such as `spec.queue`; "" if there is none. Raises msgspec.DecodeError."""
        part, *keys, last = path.split(".")
        fields = self.spec if part == "spec" else self.status
        for key in keys:
            fields = (_fields.decode(fields[key]) if key in fields else None) or {}
        return (_text.decode(fields[last]) if last in fields else None) or ""

    def first_text(self, paths: tuple[str, ...]) -> str:
        return next((text for path in paths if (text := self.text(path))), "")


Link = tuple[str, str, str]
"""Identifies an object linked to a pod: ("gang" | "queue", namespace, name), or ("owner", namespace, uid). For objects
above a queue that pods name: ("leading" | "above", "", name)."""


@dataclass(frozen=True, slots=True)
class LinkedQueue:
    """The queue in one linked object. above: the one that leads it, "" if the object does not name it."""

    link: Link
    queue: str
    above: str = ""


_Kept = dict[Link, LinkedQueue]
_Keep = Callable[[QueueObject], LinkedQueue | None]


@dataclass(frozen=True, slots=True)
class _Levels:
    """What is known of the queues of a scheduler that other objects lead."""

    of: LedQueues
    queues: _Kept = field(default_factory=dict)
    workloads: _Kept = field(default_factory=dict)
    leading: _Kept = field(default_factory=dict)
    groups: _Kept = field(default_factory=dict)

    def watched(self) -> tuple[tuple[tuple[str, ...], _Keep, _Kept], ...]:
        """For each kind: the paths of its list, what is kept of an object, and where."""
        return (
            (self.of.queue_paths, self._queue, self.queues),
            (self.of.workload_paths, self._workload, self.workloads),
            (self.of.leading_paths, self._leading, self.leading),
            (self.of.group_paths, self._group, self.groups),
        )

    def above(self, leading: str) -> list[str]:
        """The groups of a leading queue, nearest first. A cycle, with which a scheduler admits nothing, is followed
        once."""
        found: list[str] = []
        at = self.leading.get(("leading", "", leading))
        while at is not None and at.above and at.above not in found:
            found.append(at.above)
            at = self.groups.get(("above", "", at.above))
        return found

    def below(self, link: Link) -> list[Link]:
        """The queues and workloads below a leading queue or a group."""
        kind, _, name = link
        return [
            one.link
            for one in (*self.queues.values(), *self.workloads.values())
            if name in (self.above(one.above) if kind == "above" else [one.above])
        ]

    def ref(self, space: str, chain: Chain, found: str) -> str:
        """The queue of a pod with the levels above it; `found` if it is none of this scheduler.

        found: by labels alone."""
        works = [
            self.workloads[link] for owner in chain.owners if (link := ("owner", space, owner.uid)) in self.workloads
        ]
        own = f"{self.of.scheduler}:{space}/"
        if not found and works and works[0].queue:
            found = own + works[0].queue
        if not found.startswith(f"{self.of.scheduler}:"):
            return found
        local = self.queues.get(("queue", space, found.removeprefix(own)))
        leading = next((linked.above for linked in (*works, local) if linked and linked.above), "")
        return with_levels(found, leading, self.above(leading)) if leading else found

    def _queue(self, queue: QueueObject) -> LinkedQueue | None:
        meta, above = queue.metadata, queue.first_text(self.of.levels.queues.above)
        return LinkedQueue(("queue", meta.namespace, meta.name), meta.name, above) if above else None

    def _workload(self, work: QueueObject) -> LinkedQueue | None:
        owner = next(iter(work.metadata.owner_references or ()), None)
        if owner is None:
            return None
        level = self.of.levels.workloads
        # A pod's owner may write any uid as its owner's, so a workload counts only for pods of its own namespace.
        link = ("owner", work.metadata.namespace, owner.uid)
        return LinkedQueue(link, work.text(level.queue), work.first_text(level.above))

    def _leading(self, queue: QueueObject) -> LinkedQueue:
        name = queue.metadata.name
        return LinkedQueue(("leading", "", name), name, queue.first_text(self.of.levels.leading.above))

    def _group(self, group: QueueObject) -> LinkedQueue:
        name = group.metadata.name
        return LinkedQueue(("above", "", name), name, group.first_text(self.of.levels.groups.above))


class Queuing:
    """Watches the objects that determine queues. Not thread-safe except for `reflectors`, each of which belongs to one
    thread.

    changed: called with the link of every object that changed."""

    def __init__(self, api: Api, changed: Callable[[Link], None], now_ms: Callable[[], int]) -> None:
        self._changed = changed
        self._now_ms = now_ms
        self._last: dict[str, LinkedQueue] = {}
        self._gangs: tuple[tuple[str, _Kept], ...] = tuple((each.label, {}) for each in groups_with_queue())
        """The objects of each scheduler that name the queues of gangs, with a label that names a queue."""
        self._levels = tuple(_Levels(each) for each in led_queues())
        self.reflectors = (
            *(
                self._reflector(api, each.paths, _gang, into)
                for each, (_, into) in zip(groups_with_queue(), self._gangs, strict=True)
            ),
            *(self._reflector(api, *each) for levels in self._levels for each in levels.watched()),
        )

    def ref(self, pod: PodSighting, chain: Chain, found: str) -> str:
        """The queue of a pod. found: by its labels alone, as in agent.wire.PodFacts."""
        marks, space = dict(pod.marks), pod.facts.namespace
        for label, gangs in self._gangs:
            for key in group_keys():
                gang = gangs.get(("gang", space, marks.get(key, "")))
                ref = queue_ref(space, pod.scheduler, {label: gang.queue}) if gang else ""
                if ref:
                    return ref
        for levels in self._levels:
            found = levels.ref(space, chain, found)
        return found

    def _report_change(self, link: Link) -> None:
        """Reports the change of an object: for the pods that name it, or for all whose queue is below it."""
        if link[0] not in ("leading", "above"):
            self._changed(link)
            return
        for levels in self._levels:
            for below in levels.below(link):
                self._changed(below)

    def _reflector(
        self, api: Api, paths: tuple[str, ...], keep: _Keep, into: _Kept
    ) -> Reflector[QueueObject, LinkedQueue]:
        def changed(uid: str, linked: LinkedQueue | None) -> None:
            before = self._last.pop(uid, None)
            if linked is None:
                if before is not None and into.get(before.link) == before:
                    del into[before.link]
                return  # the queue of a pod that ended does not change any more
            self._last[uid] = into[linked.link] = linked
            self._report_change(linked.link)

        return Reflector(
            api, paths[0], QueueObject, keep, changed, others=paths[1:], optional=True, now_ms=self._now_ms
        )


def links(pod: PodSighting) -> set[Link]:
    """The objects that may name the pod's queue, as far as the pod names them."""
    marks, space = dict(pod.marks), pod.facts.namespace
    found: set[Link] = {("gang", space, marks[key]) for key in group_keys() if key in marks}
    found |= {("queue", space, marks[key]) for each in led_queues() for key in each.keys if key in marks}
    if pod.owner is not None:
        found.add(("owner", space, pod.owner.uid))
    return found


def _gang(gang: QueueObject) -> LinkedQueue | None:
    meta, queue = gang.metadata, gang.text("spec.queue")
    return LinkedQueue(("gang", meta.namespace, meta.name), queue) if queue else None
