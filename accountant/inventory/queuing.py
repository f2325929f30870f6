"""Which queue a pod really is in, by the schedulers' own objects: pod groups, LocalQueues, Workloads.

A pod need not carry its queue as a label. KAI and Volcano keep it in the PodGroup that they place by, so that is
believed before any label, on pods that the same scheduler places (agent.queues). Kueue's LocalQueue stands for a
ClusterQueue, and a policy may name either: where it leads is added behind an `@`
(`kueue:NAMESPACE/NAME@CLUSTERQUEUE`, accountant.store.writing.assignment); the Workload of the pod's owner says which
ClusterQueue admitted it. Its cohorts follow, nearest first, each behind a `^`, for a policy that names those. A kind
that the cluster does not serve says nothing and is asked for again later. KAI's and Volcano's Queue objects are not
watched: a reference names them as they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from accountant.inventory.kube import Api, ClusterQueue, Cohort, GroupQueue, LocalQueue, QueueWorkload
from accountant.inventory.owners import Chain
from accountant.inventory.podfacts import GROUP_KEYS, Sighted
from accountant.inventory.reflector import Reflector
from agent.queues import KUEUE_QUEUE, queue_ref

Link = tuple[str, str, str]
"""What ties a pod to such an object: ("group" | "local", namespace, name), or ("owner", "", uid). Above them, for
what a LocalQueue leads to: ("cluster-queue" | "cohort", "", name)."""
KAI_GROUPS = ("/apis/scheduling.run.ai/v2alpha2/podgroups",)
VOLCANO_GROUPS = ("/apis/scheduling.volcano.sh/v1beta1/podgroups",)
LOCAL_QUEUES = ("/apis/kueue.x-k8s.io/v1beta2/localqueues", "/apis/kueue.x-k8s.io/v1beta1/localqueues")
WORKLOADS = ("/apis/kueue.x-k8s.io/v1beta2/workloads", "/apis/kueue.x-k8s.io/v1beta1/workloads")
CLUSTER_QUEUES = ("/apis/kueue.x-k8s.io/v1beta2/clusterqueues", "/apis/kueue.x-k8s.io/v1beta1/clusterqueues")
COHORTS = ("/apis/kueue.x-k8s.io/v1beta2/cohorts", "/apis/kueue.x-k8s.io/v1beta1/cohorts")
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
        self._leading: dict[Link, Told] = {}
        self._cohort: dict[Link, Told] = {}
        self.reflectors = (
            self._reflector(api, KAI_GROUPS, GroupQueue, _group, self._kai),
            self._reflector(api, VOLCANO_GROUPS, GroupQueue, _group, self._volcano),
            self._reflector(api, LOCAL_QUEUES, LocalQueue, _local, self._local),
            self._reflector(api, WORKLOADS, QueueWorkload, _workload, self._work),
            self._reflector(api, CLUSTER_QUEUES, ClusterQueue, _cluster_queue, self._leading),
            self._reflector(api, COHORTS, Cohort, _cohort, self._cohort),
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
        return "^".join((f"{found}@{leads}", *self._cohorts(leads))) if leads else found

    def _cohorts(self, cluster_queue: str) -> list[str]:
        """Of a ClusterQueue, nearest first; a circle, which Kueue does not admit anything by, is gone round once."""
        found: list[str] = []
        told = self._leading.get(("cluster-queue", "", cluster_queue))
        while told is not None and told.queue and told.queue not in found:
            found.append(told.queue)
            told = self._cohort.get(("cohort", "", told.queue))
        return found

    def _tell(self, link: Link) -> None:
        """An object says something new: of pods that name it, or of all whose ClusterQueue it is above."""
        kind, _, name = link
        if kind not in ("cluster-queue", "cohort"):
            self._changed(link)
            return
        for told in [*self._local.values(), *self._work.values()]:
            above = self._cohorts(told.cluster_queue) if kind == "cohort" else [told.cluster_queue]
            if name in above:
                self._changed(told.link)

    def _reflector(
        self,
        api: Api,
        paths: tuple[str, ...],
        decode: type[GroupQueue] | type[LocalQueue] | type[QueueWorkload] | type[ClusterQueue] | type[Cohort],
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
            self._tell(told.link)

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


def _cluster_queue(queue: ClusterQueue) -> Told:
    return Told(("cluster-queue", "", queue.metadata.name), queue.spec.cohort_name or queue.spec.cohort)


def _cohort(cohort: Cohort) -> Told:
    return Told(("cohort", "", cohort.metadata.name), cohort.spec.parent_name)


def _workload(work: QueueWorkload) -> Told | None:
    owner = next(iter(work.metadata.owner_references or ()), None)
    if owner is None:
        return None
    admitted = work.status.admission.cluster_queue if work.status.admission is not None else ""
    return Told(("owner", "", owner.uid), work.spec.queue_name, admitted)
