"""Builds the inventory from an API server by list and watch.

Each kind of object has a reflector, which lists and watches it in a thread of its own and keeps the needed fields.
`read` derives facts from these fields. It returns the facts of a pod in every call until the caller confirms with
`taken` that it stored them. The chain of owners of a pod is looked up only once. If the server does not answer, the
previous state stays, and time reported by agents is still billed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import structlog
from msgspec import structs

from accountant.inventory import node_facts_and_downtime
from accountant.inventory.node_facts_and_downtime import CORDONED, NOT_READY, NodeObservation
from accountant.inventory.pod_facts import (
    NodeObject,
    PodObject,
    PodSighting,
    as_placed,
    complete,
    milliseconds,
    pod_sighting,
)
from accountant.inventory.pod_owners import Chain, Owners
from accountant.inventory.pod_queues import Link, Queuing, links
from accountant.ledger.protocols import EPOCH_KEY, EpochReport, Facts, JobKey, NamespaceFacts, NodeFacts, annotated
from accountant.ledger.team_assignment import namespace_facts
from agent.wire import PodFacts
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.errors import ClusterError
from gputally.base.gpu_model_names import MODEL_LABELS
from gputally.base.gpu_resources import is_gpu_resource
from gputally.kubernetes.list_watch import NamedObject, Reflector
from gputally.kubernetes.objects import Api

_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_OWN_REASONS = frozenset({NOT_READY, CORDONED})


@dataclass(frozen=True, slots=True)
class KindSeen:
    """The state of the watch of one kind.

    heard_ms: time of the last answer; None if there was none.
    failures: number of failures.
    unreadable: number of objects that cannot be read."""

    kind: str
    heard_ms: int | None
    failures: int
    unreadable: int


class ClusterInventory:
    """Implements accountant.ledger.protocols.Inventory for one API server.

    cluster: its name in the ledger.
    known: the nodes in the ledger, whose histories continue.
    team_keys: further namespace labels that name a team.
    user_keys: further labels and annotations of pods that name their user.
    exported: labels of pods that are dimensions."""

    def __init__(
        self,
        api: Api,
        clock: Clock,
        cluster: str,
        known: Iterable[NodeFacts] = (),
        team_keys: Collection[str] = (),
        user_keys: Collection[str] = (),
        exported: Collection[str] = (),
        tasks: BackgroundTasks | None = None,
    ) -> None:
        self._clock = clock
        self._cluster = cluster
        self._team_keys, self._user_keys = tuple(team_keys), tuple(user_keys)
        self._log = structlog.get_logger("gputally.kubernetes.api_client")
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._tasks = tasks or BackgroundTasks(clock)
        self._watching: list[BackgroundTask] = []
        self._nodes_known = {
            node.name: replace(node, down=tuple(d for d in node.down if d.reason in _OWN_REASONS))
            for node in known
            if node.cluster == cluster
        }
        self._dirty_lock = threading.Lock()
        self._dirty: dict[str, PodSighting] = {}
        self._last: dict[str, PodSighting] = {}
        self._unconfirmed: dict[str, PodSighting] = {}
        self._epochs: dict[tuple[str, str], tuple[int, int | None]] = {}
        """By pod (uid) and text of its epoch annotation: the instants at which the text was first seen, and written."""
        self._unconfirmed_epochs: frozenset[tuple[str, str]] = frozenset()
        self._owners = Owners(api)
        self._kept_labels = frozenset(exported)
        """Exported labels, and those by which some namespace lets pods choose a team."""
        self._linked: dict[Link, set[str]] = {}
        self._queuing = Queuing(api, self._queue_changed, clock.wall_ms)
        self._spaces: Reflector[NamedObject, NamespaceFacts] = Reflector(
            api, "/api/v1/namespaces", NamedObject, self._namespace, metadata_only=True, now_ms=clock.wall_ms
        )
        self._nodes: Reflector[NodeObject, NodeObservation] = Reflector(
            api, "/api/v1/nodes", NodeObject, self._node_observation, now_ms=clock.wall_ms
        )
        self._pods: Reflector[PodObject, PodSighting] = Reflector(
            api, "/api/v1/pods", PodObject, self._pod_sighting, self._pod_changed, now_ms=clock.wall_ms
        )

    def start(self) -> None:
        """Starts the watch threads, which run until `close`."""
        for reflector in self._every:
            name = f"watch {reflector.path}"
            task = self._tasks.add(name)
            thread = threading.Thread(target=reflector.run, args=(self._stop, task), name=name, daemon=True)
            thread.start()
            task.watch(thread)
            self._watching.append(task)
            self._threads.append(thread)

    def sync(self) -> None:
        """Lists everything once, in this thread. Raises ClusterError."""
        for reflector in (self._spaces, self._nodes, self._pods):
            reflector.sync()
        for optional in self._queuing.reflectors:
            _unless_absent(optional, optional.sync)

    def follow(self) -> None:
        """Runs one watch of each kind, in this thread. Raises ClusterError."""
        for reflector in (self._spaces, self._nodes, self._pods):
            reflector.follow()
        for optional in self._queuing.reflectors:
            if optional.synced:
                optional.follow()

    def close(self) -> None:
        """Ends the watches. They run in daemon threads, so a server that does not answer does not delay the exit."""
        self._stop.set()
        for task in self._watching:
            task.end()

    @property
    def kinds(self) -> tuple[KindSeen, ...]:
        """The state of the watch of each kind of object."""
        return tuple(
            KindSeen(
                reflector.path.rpartition("/")[2] + _group_of(reflector.path),
                reflector.heard_ms,
                reflector.failures,
                len(reflector.unreadable()),
            )
            for reflector in self._every
        )

    @property
    def pods_heard_ms(self) -> int | None:
        """Time of the API server's last answer about pods; None if there was none."""
        return self._pods.heard_ms

    @property
    def _every(self) -> tuple[Reflector[Any, Any], ...]:
        return (self._spaces, self._nodes, self._pods, *self._queuing.reflectors)

    @property
    def synced(self) -> bool:
        """Whether everything has been listed at least once."""
        return self._spaces.synced and self._nodes.synced and self._pods.synced

    def read(self, now_ms: int) -> Facts:
        if self._nodes.synced:
            self._observe_nodes(now_ms)
        pods, epochs = self._new_facts()
        return Facts(
            nodes=tuple(self._nodes_known[name] for name in sorted(self._nodes_known)),
            namespaces=tuple(sorted(self._spaces.values().values(), key=lambda space: space.name)),
            pods=pods,
            epochs=epochs,
        )

    def taken(self) -> None:
        with self._dirty_lock:
            for uid, pod in self._unconfirmed.items():
                if self._dirty.get(uid) is pod:
                    del self._dirty[uid]
            self._unconfirmed = {}
            for reported in self._unconfirmed_epochs:
                self._epochs.pop(reported, None)
            self._unconfirmed_epochs = frozenset()

    def _observe_nodes(self, now_ms: int) -> None:
        sights = {sight.name: sight for sight in self._nodes.values().values()}
        known = self._nodes_known
        for name, sight in sights.items():
            known[name] = node_facts_and_downtime.seen(known.get(name), sight, now_ms)
        for name in known.keys() - sights.keys():
            known[name] = node_facts_and_downtime.deleted_node(known[name], now_ms)

    def _new_facts(self) -> tuple[tuple[tuple[str, PodFacts], ...], tuple[EpochReport, ...]]:
        """The pods with new facts, and the epochs that their annotations report."""
        with self._dirty_lock:
            waiting, epochs = dict(self._dirty), dict(self._epochs)
        try:
            self._owners.learn(pod.owner for pod in waiting.values() if pod.owner is not None)
        except ClusterError as error:
            # Their known facts are sent now, and again when the owners are known; an epoch needs the job's name.
            self._log.warning("owners_not_read", reason=str(error))
            confirmable: dict[str, PodSighting] = {}
            epochs = {}
        else:
            confirmable = waiting
        with self._dirty_lock:
            self._unconfirmed, self._unconfirmed_epochs = confirmable, frozenset(epochs)
        facts = {uid: self._complete(pod, self._owners.chain(pod.owner)) for uid, pod in sorted(waiting.items())}
        ended = []
        for (uid, text), instants in sorted(epochs.items()):
            pod, found = facts.get(uid), annotated({EPOCH_KEY: text}, *instants)
            if pod is not None and found is not None:
                job = JobKey.of_pod(self._cluster, pod.namespace, pod.workload, pod.name)
                ended.append(EpochReport(job, *found, f"pod {pod.namespace}/{pod.name}"))
        return tuple((self._cluster, fact) for fact in facts.values()), tuple(ended)

    def _complete(self, pod: PodSighting, chain: Chain) -> PodFacts:
        facts = complete(pod, chain)
        return structs.replace(facts, queue_ref=self._queuing.ref(pod, chain, facts.queue_ref))

    def _queue_changed(self, link: Link) -> None:
        """Marks pods whose queue may have become known, so that they are sent again."""
        with self._dirty_lock:
            for uid in self._linked.get(link, ()):
                if uid in self._last:
                    # A new object, so that a reading in progress does not confirm it.
                    self._dirty[uid] = replace(self._last[uid])

    def _pod_changed(self, uid: str, pod: PodSighting | None) -> None:
        with self._dirty_lock:
            if pod is not None:
                if pod.epoch and (uid not in self._last or self._last[uid].epoch != pod.epoch):
                    self._epochs.setdefault((uid, pod.epoch), (self._clock.wall_ms(), pod.epoch_ms))
                self._dirty[uid] = self._last[uid] = pod
                for link in links(pod):
                    self._linked.setdefault(link, set()).add(uid)
                return
            last = self._last.pop(uid, None)
            if last is None:
                return
            for link in links(last):
                self._linked.get(link, set()).discard(uid)
                if not self._linked.get(link):
                    self._linked.pop(link, None)
            # Deleted pods: their end is the reported one, or now.
            now = self._clock.wall_ms()
            ended = last.facts.ended_ms if last.facts.ended_ms is not None else now
            self._dirty[uid] = replace(last, facts=structs.replace(last.facts, ended_ms=ended, observed_ms=now))

    def _pod_sighting(self, pod: PodObject) -> PodSighting | None:
        found = pod_sighting(pod, self._clock.wall_ms(), self._kept_labels, self._user_keys)
        known = self._last.get(pod.metadata.uid)
        if found and known and known.facts.scheduled_ms is not None:
            found = replace(found, marks=as_placed(found.marks, known.marks))
        # Unchanged, so it is the same observation, not a newer one.
        if found and known and found.epoch == known.epoch:
            same = structs.replace(found.facts, observed_ms=known.facts.observed_ms) == known.facts
            return known if same else found
        return found

    def _namespace(self, space: NamedObject) -> NamespaceFacts:
        meta = space.metadata
        found = namespace_facts(self._cluster, meta.name, meta.labels or {}, meta.annotations or {}, self._team_keys)
        if found.label:
            self._kept_labels |= {found.label}
        return found

    def _node_observation(self, node: NodeObject) -> NodeObservation | None:
        meta, labels = node.metadata, node.metadata.labels or {}
        has_gpu = any(is_gpu_resource(name) for name in node.status.capacity or ())
        if not has_gpu and meta.name not in self._nodes_known and not any(labels.get(key) for key in MODEL_LABELS):
            return None
        ready = next((c for c in node.status.conditions or () if c.type == "Ready"), None)
        taint = next((t for t in node.spec.taints or () if t.key == _UNSCHEDULABLE), None)
        return NodeObservation(
            cluster=self._cluster,
            name=meta.name,
            labels=labels,
            ready=ready is not None and ready.status == "True",
            ready_since_ms=milliseconds(ready.last_transition_time) if ready else None,
            cordoned=bool(node.spec.unschedulable),
            cordoned_ms=milliseconds(taint.time_added) if taint else None,
            provider_id=node.spec.provider_id,
            uid=meta.uid,
            boot_id=node.status.node_info.boot_id,
            created_ms=milliseconds(meta.creation_timestamp),
        )


def _unless_absent(reflector: Reflector[Any, Any], act: Callable[[], None]) -> None:
    """Runs `act`, and ignores that the server does not serve an optional kind."""
    for _ in range(reflector.path_count):
        try:
            act()
        except ClusterError as error:
            if not reflector.absent(error):
                raise
        else:
            return


def _group_of(path: str) -> str:
    """`.GROUP` of an API path; "" for the core group."""
    parts = path.split("/")
    return f".{parts[2]}" if parts[1] == "apis" else ""
