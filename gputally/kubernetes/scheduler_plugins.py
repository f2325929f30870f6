"""What a scheduler is to gputally: how its pods name their queues, what its queues are, and where the code is that
reads and writes them. The agent, the accountant and the controller read the same manifest.

The agent and the accountant load the module of the manifest too, so it imports this module and little else. The
controller alone loads the adapter (`fairshare.targets.weight_plan.Adapter`).

    SCHEDULER = SchedulerPlugin("lanes", ("lanes",), "lanes_adapter:Lanes", ((LANE,),), "writes weights of Lanes", PAGE)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec

from gputally.base.plugins import OURS, plugins, usable
from gputally.base.untrusted_text import is_plugin_name, known_plugin_name
from gputally.kubernetes import objects
from gputally.kubernetes.mig_parts import MigParts
from gputally.kubernetes.objects import GPU, MIG, Kind, Object, gpus
from gputally.kubernetes.rights import Rights

SEAM: Final = "gputally.schedulers"


_SHARED: Final = (
    objects.BUDGET, objects.CONFIG_MAP, objects.EVENT, objects.LEASE, objects.NODE, objects.POD, objects.PRIORITY_CLASS,
    *objects.POD_GROUPS,
)  # fmt: skip


def _identity(kind: Kind) -> tuple[str, str]:
    """Return the group and the kind, whatever the version."""
    return kind.api_version.rpartition("/")[0], kind.kind


_OF_KUBERNETES: Final = frozenset(map(_identity, _SHARED))
"""The kinds that the controller itself reads or writes."""
_log = logging.getLogger("gputally.schedulers")


class PodQueueLabels(msgspec.Struct, frozen=True):
    """The labels and annotations with which pods name their queue.

    keys: the keys of the labels and annotations, the newest first.
    scheduler_names: values of a pod's `schedulerName` with which the scheduler places it. Users write labels, so a
        label counts only on a pod that the queue's own scheduler places. None: the scheduler places no pods; a label
        then names a queue of the pod's own namespace, in which an administrator created it."""

    keys: tuple[str, ...]
    scheduler_names: frozenset[str] | None


class JobLabel(msgspec.Struct, frozen=True):
    """A label that names a pod's job.

    kind: the kind of the job.
    below: kinds that such a job owns. The label counts only if the known chain of the pod's owners ends in one of these
        kinds or is empty."""

    label: str
    kind: str
    below: frozenset[str] = frozenset()


class PodJobLabels(msgspec.Struct, frozen=True):
    """The labels that the controllers of a scheduler's own jobs put on pods, to name a job whose chain of owners is not
    known in full.

    labels: the nearest to the pod first.
    kind, name: labels with the kind and the name of the job, which take precedence over owners; "": there are none."""

    labels: tuple[JobLabel, ...] = ()
    kind: str = ""
    name: str = ""


class PodGangKeys(msgspec.Struct, frozen=True):
    """The labels and annotations with which pods name their gang, and what else a scheduler places them by. They count
    on pods that the scheduler places; of one that places no pods, `gang` counts on every pod. "": pods do not say it.

    kind: the kind of the objects that stand for gangs, one of the scheduler's own.
    gang: the annotation with the name of this object.
    further: other annotations that only name a pod's gang as its job.
    part_label, part_annotation: the label or annotation that names the pod's part of the gang.
    disruptable: the annotation, or else the label, whose value `false` protects the pod from preemption.
    leaders: the labels that the first pods of a gang have, in the order in which they count; each with its values.
    rank: the label with the pod's priority in its gang, a whole number. The highest is the first.
    names_queue: whether `spec.queue` of such an object names the queue of its pods, which then takes precedence over
        their labels. The accountant watches these objects, so the manifest's `rights` allow it."""

    kind: str
    gang: str
    part_label: str = ""
    part_annotation: str = ""
    disruptable: str = ""
    leaders: tuple[tuple[str, ...], ...] = ()
    rank: str = ""
    names_queue: bool = False
    further: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        leaders: Any = self.leaders  # of another package
        if not isinstance(leaders, tuple) or not all(isinstance(one, tuple) and len(one) > 1 for one in leaders):
            raise ValueError(f"leaders are {str(leaders)[:80]}, not labels, each with its values")


class LevelObjects(msgspec.Struct, frozen=True):
    """Objects of one kind, one of the scheduler's own.

    above: the fields that may name what is above, in the order in which they count, such as `spec.clusterQueue`.
    queue: the field with the queue that pods name, if it is not the object itself."""

    kind: str
    above: tuple[str, ...]
    queue: str = ""


class QueueLevels(msgspec.Struct, frozen=True):
    """What is above the queues that pods name in their own namespace, for a policy that names that instead. The
    accountant watches these objects, so the manifest's `rights` allow it. References to the leading queues begin with
    the scheduler's name.

    queues: the queues that pods name, in their own namespace. What is above is the queue of the cluster that leads it.
    workloads: objects for the pods of their first owner, which name their queue, and what is above it once they are
        admitted. This takes precedence over the queue's own.
    leading: the queues of the cluster. What is above is a group.
    groups: groups of queues and of groups. One that is only named has no object.
    prefix: what references to groups begin with, one of the manifest's prefixes."""

    queues: LevelObjects
    workloads: LevelObjects
    leading: LevelObjects
    groups: LevelObjects
    prefix: str

    @property
    def each(self) -> tuple[LevelObjects, LevelObjects, LevelObjects, LevelObjects]:
        return self.queues, self.workloads, self.leading, self.groups


class SharedGpuKeys(msgspec.Struct, frozen=True):
    """The annotations with which pods that the scheduler places request parts of GPUs, and with which it says which
    GPUs they got.

    fraction: the part of each GPU, a number above 0 and at most 1.
    memory: the memory on each GPU, in whole MiB.
    devices: the number of GPUs; one without it.
    reservations: namespaces whose pods hold the GPUs for those that share them. The name of the scheduler is then a
        word of the agent's setting `gpu_sharing`.
    group: the label with which the scheduler joins a reservation with the pods that share its GPU; a pod on several
        GPUs has one for each, `group/NAME`. "": the running processes show who shares it."""

    fraction: str
    memory: str
    devices: str
    reservations: frozenset[str] = frozenset()
    group: str = ""


class OwnQueue(msgspec.Struct, frozen=True):
    """A queue of a scheduler, as its own object defines it.

    quota: its guaranteed GPUs; None if the object states none.
    nested: True if it is below another queue.
    refs: the references by which a policy can name the queue."""

    scheduler: str
    name: str
    quota: float | None = None
    nested: bool = False
    refs: Sequence[str] = ()


def no_own_queue(_obj: Object, _parts: MigParts) -> OwnQueue | None:
    """For a scheduler whose queues are no objects."""
    return None


def stated_gpus(resources: object, parts: MigParts) -> float | None:
    """Return the number of GPUs among resources; None if no resource is a GPU."""
    if not isinstance(resources, Mapping) or not any(str(name).startswith((MIG, GPU)) for name in resources):
        return None
    return gpus(resources, parts.anywhere)


class SettingFile(msgspec.Struct, frozen=True):
    """A setting of the controller that names a file or a folder, and an option of commands that reach the scheduler.

    help: what it is, for people."""

    name: str
    help: str


class SchedulerPlugin(msgspec.Struct, frozen=True):
    """The manifest of a scheduler.

    name: the scheduler's name in reports, metrics, decisions and references to queues of pods, also the name of the
        entry point. Its section of the policy has the same name, with `_` for `-` and `.`.
    prefixes: what references to its queues begin with in a policy (`lanes:`).
    adapter: where the adapter's class is, as `module:Class`. It is made without arguments, and connects to nothing.
    kinds: the kinds that the adapter and preemption read or write, each with the supported versions, the newest first.
        The first kind is that of the queues: the scheduler is installed if the API server serves it. Empty if the
        scheduler has no objects in the cluster. A kind is of one scheduler, and none of Kubernetes itself.
    settings: where the model of its section of the policy is, as `module:Class`, for one of gputally's own schedulers,
        whose sections the accountant checks too. That of another package is the adapter's (`Adapter.settings`).
    files: settings of the controller for one of gputally's own schedulers that is reached outside the cluster.
    reaches: what it reads, writes and connects to, for the operator.
    page: the page about it.
    pods: how its pods name their queue; None if they do not.
    gangs: how its pods name their gang; None if they do not.
    jobs: how its pods name their job; None if they do not.
    levels: what is above the queues that pods name; None if nothing is.
    shares: how its pods request parts of GPUs; None if they cannot.
    stop_condition: the type of a pod's condition with which this scheduler alone says that it stops the pod, beside
        `DisruptionTarget`, which every scheduler may set; "": it has none.
    shard_label: the label of nodes by which the scheduler divides a cluster into parts, each with its own usage; "": it
        does not.
    own_queue: returns the queue that an object of the first kind defines; None if it is no queue of users.
    workloads: whether the adapter reads workloads, so that victims can be chosen among them.
    player: where the class is that plays its programs in the demo (`fairshare.targets.scheduler_player`), as
        `module:Class`; "": the demo cannot play it.
    notes: whether the controller keeps notes for it in a ConfigMap, with `-NAME` after the name of its own.
    rights: the rights in the cluster that it needs, of any program."""

    name: str
    prefixes: tuple[str, ...]
    adapter: str
    kinds: tuple[tuple[Kind, ...], ...]
    reaches: str
    page: str
    pods: PodQueueLabels | None = None
    gangs: PodGangKeys | None = None
    jobs: PodJobLabels | None = None
    levels: QueueLevels | None = None
    shares: SharedGpuKeys | None = None
    stop_condition: str = ""
    shard_label: str = ""
    own_queue: Callable[[Object, MigParts], OwnQueue | None] = no_own_queue
    workloads: bool = True
    notes: bool = False
    rights: tuple[Rights, ...] = ()
    settings: str = ""
    player: str = ""
    files: tuple[SettingFile, ...] = ()

    def __post_init__(self) -> None:
        for word in (self.name, *self.prefixes):
            known_plugin_name(word)
        kinds: tuple[Any, ...] = self.kinds
        for versions in kinds:
            if versions == ():
                raise ValueError("kinds has a kind without a version")
            for kind in versions if isinstance(versions, tuple) else ():  # the registry names other types
                if isinstance(kind, Kind) and _identity(kind) in _OF_KUBERNETES:
                    raise ValueError(f"the kind {kind.kind} is of Kubernetes itself")
        gangs: Any = self.gangs
        if isinstance(gangs, PodGangKeys) and gangs.kind not in self._kind_names:
            raise ValueError(f"the kind {gangs.kind!r} of gangs is none of the scheduler's own")
        levels: Any = self.levels
        pods: Any = self.pods
        if isinstance(levels, QueueLevels) and getattr(pods, "scheduler_names", ()) is not None:
            raise ValueError("levels are of queues in the namespaces of their pods: set scheduler_names=None in pods")
        for level in levels.each if isinstance(levels, QueueLevels) else ():
            kind = getattr(level, "kind", None)
            if kind not in self._kind_names:
                raise ValueError(f"the kind {kind!r} of levels is none of the scheduler's own")

    @property
    def _kind_names(self) -> frozenset[str]:
        kinds: tuple[Any, ...] = self.kinds
        versions = [one for one in kinds if isinstance(one, tuple)]  # the registry names other types
        return frozenset(kind.kind for several in versions for kind in several if isinstance(kind, Kind))

    @property
    def claims(self) -> tuple[str, ...]:
        """What no other scheduler can have: name, prefixes, section and kinds."""
        kinds = {_identity(kind) for versions in self.kinds for kind in versions}
        words = sorted({self.name, *self.prefixes})
        return (
            *(f"the prefix {word}" for word in words),
            f"the section {self.section}",
            *(f"the kind {kind}.{group}" for group, kind in sorted(kinds)),
        )

    @property
    def section(self) -> str:
        """The name of its section of the policy."""
        return section_of(self.name)


def section_of(name: str) -> str:
    """Return the name of a scheduler's section of the policy."""
    return re.sub("[.-]", "_", name)


@cache
def schedulers() -> Mapping[str, SchedulerPlugin]:
    """Return the manifests of the installed schedulers by name. What cannot be used is logged once, and left out."""
    for one in plugins(SEAM, SchedulerPlugin):
        if one.fault:
            _log.warning("the scheduler %s of the package %s is left out: %s", one.name, one.package, one.fault)
    found = usable(SEAM, SchedulerPlugin)
    if not found:
        _log.error("no scheduler is installed as a package here, so pods have no queues")
    return found


def own_schedulers() -> tuple[SchedulerPlugin, ...]:
    """Return the manifests of this package's schedulers."""
    return tuple(one.manifest for one in plugins(SEAM, SchedulerPlugin) if one.package == OURS and one.manifest)


def left_out() -> Mapping[str, str]:
    """Return why a scheduler cannot be used, by its name, which is a prefix of references too."""
    taken = {word for one in schedulers().values() for word in (one.name, *one.prefixes)}
    return {
        one.name: f"{one.name} of the package {one.package} cannot be used: {one.fault}"
        for one in plugins(SEAM, SchedulerPlugin)
        if one.fault and one.name not in taken and is_plugin_name(one.name)
    }
