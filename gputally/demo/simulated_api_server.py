"""The demo's API server, which has a pod for every job that waits or runs. The accountant's inventory watches it.

The programs that write pods in a real cluster are played here: the controllers of jobs, which create pods, the
scheduler, which binds pods and takes GPUs from them, the kubelets, which say how pods ended, and the taint manager.
They write what the real ones write.

Some training jobs write checkpoints (`cluster_and_workload.saves`). They say so as jobs do that report epochs: the
first pod is annotated with the number and the time of the newest one.

While a gang waits, it has as few pods as its GPUs need. How many there are in the end is decided when it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from operator import itemgetter
from typing import Any, Final

from accountant.core.periods import utc
from accountant.ledger.protocols import EPOCH_KEY
from fairshare.simulator.simulation_model import (
    Event,
    OutageBegan,
    Rules,
    SimulatedJob,
    SimulatedNodeSpec,
    Started,
    Stopped,
    slots_of,
)
from gputally.demo.cluster_and_workload import failure, labels_of, saves
from gputally.demo.played_scheduler import player, pod_marks
from gputally.demo.simulated_pods import (
    WORKLOADS,
    pod_name,
    pod_uid,
    priority_of,
    resource_of,
    slots_by_rank,
    uid_of,
)
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import NODE, POD, Api, Kind, micro_time
from gputally.kubernetes.pod_stops import DISRUPTION, PREEMPTION

NAMESPACE: Final = Kind("v1", "Namespace", "namespaces", status=False)
RULES: Final = Rules()
"""The rules of the demo's scheduler, which says when checkpoints are written."""
_Pod = dict[str, Any]


class SimulatedApiServer:
    """nodes: those of the cluster. queues: the names of the existing queues."""

    def __init__(self, nodes: Sequence[SimulatedNodeSpec], queues: Iterable[str]) -> None:
        self._cluster = MemoryCluster([NAMESPACE, NODE, POD])
        self._queues = frozenset(queues)
        self._player = player()
        self._queue_key, self._scheduler = pod_marks()
        self._largest: Counter[str] = Counter()
        """The most slots of each shape on one node."""
        for node in nodes:
            self._largest |= Counter(slot.flavour.shape for slot in slots_of(node))
        self._pods: dict[str, list[_Pod]] = {}
        """The pods of each job that waits or runs, by rank."""
        self._saved: dict[str, int] = {}
        """The number of checkpoints that each job wrote in the attempts before."""
        self._saving: dict[str, int] = {}
        """When each running job that writes checkpoints began to work."""

    def api(self) -> Api:
        """Return a client of the server."""
        return self._cluster.api()

    def apply(
        self, until_ms: int, submitted: Sequence[SimulatedJob], events: Sequence[Event], watch: Callable[[], None]
    ) -> None:
        """Apply the submissions and the events of a span in the order of time. until_ms: the end of the span. watch:
        lets whoever watches the server read the changes. It is called often enough, because the server forgets old
        changes."""
        struck: dict[int, set[str]] = {}
        for event in events:
            if isinstance(event, OutageBegan):
                struck.setdefault(event.at_ms, set()).add(event.outage.name)
        submissions = ((job.submit_ms, 0, number, job) for number, job in enumerate(submitted))
        happened = ((event.at_ms, 1, number, event) for number, event in enumerate(events))
        for number, (at_ms, _, _, one) in enumerate(sorted([*submissions, *happened], key=itemgetter(0, 1, 2)), 1):
            if isinstance(one, SimulatedJob):
                self._create(one, 1, at_ms)
            elif isinstance(one, Started):
                self._bind(one)
            elif isinstance(one, Stopped):
                self._stop(one, struck.get(at_ms, set()))
            if number % _OFTEN == 0:
                watch()
        for name in self._saving:
            if self._save(name, until_ms):
                self._cluster.load(self._pods[name][:1])
        watch()

    def _create(self, job: SimulatedJob, attempt: int, at_ms: int) -> None:
        """Create the pods of an attempt, as the controller of the job does."""
        largest = self._largest[job.shape] or job.gpus
        sizes = [largest] * (job.gpus // largest) + ([job.gpus % largest] if job.gpus % largest else [])
        self._pods[job.id] = [self._new(job, attempt, rank, gpus, at_ms) for rank, gpus in enumerate(sizes)]
        self._cluster.load(self._pods[job.id])

    def _new(self, job: SimulatedJob, attempt: int, rank: int, gpus: int, at_ms: int) -> _Pod:
        api_version, kind = WORKLOADS[job.kind]
        owner = {"apiVersion": api_version, "kind": kind, "name": job.id, "uid": uid_of(job.id), "controller": True}
        queued = job.queue in self._queues
        return {
            "apiVersion": POD.api_version,
            "kind": POD.kind,
            "metadata": {
                "namespace": job.queue,  # a namespace has the name of its team
                "name": pod_name(job, rank),
                "uid": pod_uid(job, attempt, rank),
                "labels": labels_of(job) | ({self._queue_key: job.queue} if queued else {}),
                "creationTimestamp": micro_time(at_ms),
                "ownerReferences": [owner],
            },
            "spec": {
                "schedulerName": self._scheduler if queued else "default-scheduler",
                "priority": priority_of(job),
                "containers": [_container(job, gpus)],
            },
            "status": {"phase": "Pending"},
        }

    def _bind(self, start: Started) -> None:
        """Bind the pods to the nodes of the gang's slots and start them, as the scheduler and the kubelets do."""
        job, pods = start.job, self._pods[start.job.id]
        placed = slots_by_rank(start.slots)
        pods += [self._new(job, start.attempt, rank, 0, start.queued_ms) for rank in range(len(pods), len(placed))]
        for pod in pods[len(placed) :]:
            self._delete(pod)
        del pods[len(placed) :]
        at = micro_time(start.at_ms)
        for pod, (node, slots) in zip(pods, placed, strict=True):
            pod["spec"] |= {"nodeName": node, "containers": [_container(job, len(slots))]}
            pod["status"] = {
                "phase": "Running",
                "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at}],
                "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": at}}}],
            }
        self._cluster.load(pods)
        if saves(job):
            self._saving[job.id] = start.at_ms + (RULES.restart_ms if start.attempt > 1 else 0)

    def _save(self, name: str, until_ms: int) -> int:
        """Annotate the first pod of a running job with its last checkpoint up to `until_ms`. Return the number of
        checkpoints of this attempt."""
        since_ms = self._saving[name]
        written = max(0, until_ms - since_ms) // RULES.checkpoint_ms
        if written:
            number = self._saved.get(name, 0) + written
            at = utc(since_ms + written * RULES.checkpoint_ms)
            self._pods[name][0]["metadata"]["annotations"] = {EPOCH_KEY: f"{number}@{at}"}
        return written

    def _stop(self, stop: Stopped, struck: Set[str]) -> None:
        """Say how the pods ended, and delete them; a job that has not come to its end gets new ones.

        struck: the nodes and GPUs that failed at this time."""
        at = micro_time(stop.at_ms)
        if stop.job.id in self._saving:
            self._saved[stop.job.id] = self._saved.get(stop.job.id, 0) + self._save(stop.job.id, stop.at_ms)
            del self._saving[stop.job.id]
        pods = self._pods.pop(stop.job.id)
        at_end = stop.reason == "finished"
        failed = failure(stop.job) if at_end else None
        finished = at_end and failed is None
        for pod, (node, slots) in zip(pods, slots_by_rank(stop.slots), strict=True):
            code, why = (0, "Completed") if finished else (_SIGTERM, "Error")
            if failed is not None and pod is pods[0]:
                code, why = failed
            elif stop.reason == "reclaimed":
                self._disrupt(pod, at, PREEMPTION, self._reclaim_message(pod, stop))
            elif node in struck:
                self._disrupt(pod, at, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
            elif not struck.isdisjoint(slot.gpu for slot in slots):
                code = _SIGABRT
            elif not finished:
                pod["metadata"] |= _deleted(at)  # by the job's controller, which starts the whole gang again, if at all
            pod["status"]["phase"] = "Succeeded" if finished else "Failed"
            ended = {"exitCode": code, "reason": why, "startedAt": _started(pod), "finishedAt": at}
            pod["status"]["containerStatuses"] = [{"name": "main", "state": {"terminated": ended}}]
        self._cluster.load(pods)
        for pod in pods:
            self._delete(pod)
        if not at_end:
            self._create(stop.job, stop.attempt + 1, stop.at_ms)

    def _reclaim_message(self, pod: _Pod, stop: Stopped) -> str:
        meta = pod["metadata"]
        return self._player.reclaim_message(
            f"{meta['namespace']}/{meta['name']}", f"{stop.for_queue}/{stop.for_job}", stop.compared
        )

    def _disrupt(self, pod: _Pod, at: str, reason: str, message: str) -> None:
        condition = {"type": DISRUPTION, "status": "True", "reason": reason, "message": message}
        pod["status"]["conditions"] += [condition | {"lastTransitionTime": at}]
        pod["metadata"] |= _deleted(at)

    def _delete(self, pod: _Pod) -> None:
        self._cluster.delete(POD, pod["metadata"]["name"], pod["metadata"]["namespace"])


_OFTEN = 32
"""Submissions and events between two readings of a watch: a gang that is stopped has three changes for each pod."""
_SIGTERM, _SIGABRT = 128 + 15, 128 + 6
"""Exit codes of a container that is told to end, and of one whose GPU is lost."""


def _deleted(at: str) -> dict[str, Any]:
    return {"deletionTimestamp": at, "deletionGracePeriodSeconds": 0}


def _container(job: SimulatedJob, gpus: int) -> dict[str, Any]:
    return {"name": "main", "resources": {"requests": {resource_of(job.shape): str(gpus)}}}


def _started(pod: _Pod) -> str:
    (container,) = pod["status"]["containerStatuses"]
    return str(container["state"]["running"]["startedAt"])
