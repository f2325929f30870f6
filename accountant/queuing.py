"""Which queue a pod really is in, by the schedulers' own objects: pod groups, LocalQueues, Workloads.

A pod need not carry its queue as a label. KAI and Volcano keep it in the PodGroup that they place by, so that is
believed before any label, on pods that the same scheduler places (agent.queues). Kueue's LocalQueue stands for a
ClusterQueue, and a policy may name either: where it leads is added behind an `@`
(`kueue:NAMESPACE/NAME@CLUSTERQUEUE`, accountant.store.assignment); the Workload of the pod's owner says which
ClusterQueue admitted it. A kind that the cluster does not serve says nothing and is asked for again later.
KAI's and Volcano's Queue objects are not watched: a reference names them as they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from accountant.kube import Api, GroupQueue, LocalQueue, QueueWorkload
from accountant.owners import Chain
from accountant.podfacts import GROUP_KEYS, Sighted
from accountant.reflector import Reflector
from agent.queues import KUEUE_QUEUE, queue_ref

Link = tuple[str, str, str]
"""What ties a pod to such an object: ("group" | "local", namespace, name), or ("owner", "", uid)."""
KAI_GROUPS = ("/apis/scheduling.run.ai/v2alpha2/podgroups",)
VOLCANO_GROUPS = ("/apis/scheduling.volcano.sh/v1beta1/podgroups",)
LOCAL_QUEUES = ("/apis/kueue.x-k8s.io/v1beta2/localqueues", "/apis/kueue.x-k8s.io/v1beta1/localqueues")
WORKLOADS = ("/apis/kueue.x-k8s.io/v1beta2/workloads", "/apis/kueue.x-k8s.io/v1beta1/workloads")
_LABEL = {"kai": "kai.scheduler/queue", "volcano": "scheduling.volcano.sh/queue-name"}


@dataclass(frozen=True, slots=True)
class Told:
    """What one object says: the queue of what is linked to it. cluster_queue: Kueue's, "" where it does not say."""

    link: Link
    queue: str
    cluster_queue: str = ""


class Queuing:
    """Not thread-safe but for `reflectors`, each of which belongs to one thread.

    changed: told the link of every object that says something new."""

    def __init__(self, api: Api, changed: Callable[[Link], None], now_ms: Callable[[], int]) -> None:
        self._changed = changed
        self._now_ms = now_ms
        self._last: dict[str, Told] = {}
        self._kai: dict[Link, Told] = {}
        self._volcano: dict[Link, Told] = {}
        self._local: dict[Link, Told] = {}
        self._work: dict[Link, Told] = {}
        self.reflectors = (
            self._reflector(api, KAI_GROUPS, GroupQueue, _group, self._kai),
            self._reflector(api, VOLCANO_GROUPS, GroupQueue, _group, self._volcano),
            self._reflector(api, LOCAL_QUEUES, LocalQueue, _local, self._local),
            self._reflector(api, WORKLOADS, QueueWorkload, _workload, self._work),
        )

    def ref(self, pod: Sighted, chain: Chain, found: str) -> str:
        """The queue of a pod. found: by its labels alone, as in agent.wire.PodFacts."""
        marks, space = dict(pod.marks), pod.facts.namespace
        for groups, scheme in ((self._kai, "kai"), (self._volcano, "volcano")):
            for key in GROUP_KEYS:
                told = groups.get(("group", space, marks.get(key, "")))
                ref = queue_ref(space, pod.scheduler, {_LABEL[scheme]: told.queue}) if told else ""
                if ref:
                    return ref
        works = [self._work[link] for owner in chain.owners if (link := ("owner", "", owner.uid)) in self._work]
        if not found and works and works[0].queue:
            found = f"kueue:{space}/{works[0].queue}"
        if not found.startswith("kueue:"):
            return found
        local = self._local.get(("local", space, found.removeprefix(f"kueue:{space}/")))
        leads = next((told.cluster_queue for told in (*works, local) if told and told.cluster_queue), "")
        return f"{found}@{leads}" if leads else found

    def _reflector(
        self,
        api: Api,
        paths: tuple[str, ...],
        decode: type[GroupQueue] | type[LocalQueue] | type[QueueWorkload],
        keep: Callable[..., Told | None],
        into: dict[Link, Told],
    ) -> Reflector[object, Told]:
        def changed(uid: str, told: Told | None) -> None:
            before = self._last.pop(uid, None)
            if told is None:
                if before is not None and into.get(before.link) == before:
                    del into[before.link]
                return  # what was said of pods that ended stays said
            self._last[uid] = into[told.link] = told
            self._changed(told.link)

        return Reflector(api, paths[0], decode, keep, changed, others=paths[1:], optional=True, now_ms=self._now_ms)


def links(pod: Sighted) -> set[Link]:
    """By which objects the pod's queue may be told, as far as the pod itself says."""
    marks, space = dict(pod.marks), pod.facts.namespace
    found: set[Link] = {("group", space, marks[key]) for key in GROUP_KEYS if key in marks}
    if KUEUE_QUEUE in marks:
        found.add(("local", space, marks[KUEUE_QUEUE]))
    if pod.owner is not None:
        found.add(("owner", "", pod.owner.uid))
    return found


def _group(group: GroupQueue) -> Told | None:
    meta = group.metadata
    return Told(("group", meta.namespace, meta.name), group.spec.queue) if group.spec.queue else None


def _local(queue: LocalQueue) -> Told | None:
    meta = queue.metadata
    told = queue.spec.cluster_queue
    return Told(("local", meta.namespace, meta.name), meta.name, told) if told else None


def _workload(work: QueueWorkload) -> Told | None:
    owner = next(iter(work.metadata.owner_references or ()), None)
    if owner is None:
        return None
    admitted = work.status.admission.cluster_queue if work.status.admission is not None else ""
    return Told(("owner", "", owner.uid), work.spec.queue_name, admitted)
