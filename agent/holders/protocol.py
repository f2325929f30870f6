"""What a source of holders is: it says who holds which GPU or MIG instance of this node.

A source returns `Holdings`. What it does not know is unknown, never nobody: `Unavailable(reason)` if it knows nothing,
an entry of `unknown` for each GPU of which it is not sure. A GPU that no allocation names is held by nobody.

A manifest can also be data that the agent's own sources use, because it is read for every pod or process:

- `parts`: how the pods of a system that cuts GPUs into virtual devices state their parts
- `jobs`: where a batch system puts the processes of its jobs

    HOLDERS = HolderPlugin("vms", "reads the file", PAGE, place="the file", open=lambda place, node: Vms(Path(place)))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from agent.core.readings import Allocation, Gpu, Unavailable
from agent.wire import Holder, PodFacts
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.untrusted_text import known_plugin_name
from gputally.kubernetes.rights import Rights

if TYPE_CHECKING:
    from agent.core.settings import AgentSettings

SEAM: Final = "gputally.holders"
_RESOURCE: Final = r"[a-zA-Z0-9.-]{1,253}/[a-zA-Z0-9._-]{1,63}"
_FOLDER: Final = r"[\w.@*-]{1,255}(?:/[\w.@*-]{1,255}){0,7}"


class KnownPod(msgspec.Struct, frozen=True):
    """A pod that the API server lists. containers: the names of its containers, by the container runtime's ids."""

    uid: str
    namespace: str
    name: str
    containers: Mapping[str, str] = msgspec.field(default_factory=dict)

    def named_holder(self, holder: Holder) -> Holder:
        """Return the holder of a control group with the names of the pod and the container. An unknown container keeps
        its id as its name."""
        names = [name for long_id, name in self.containers.items() if long_id.startswith(holder.container)]
        container = names[0] if len(names) == 1 else holder.container
        return Holder(kind="pod", uid=self.uid, namespace=self.namespace, name=self.name, container=container)


class Holdings(msgspec.Struct, frozen=True):
    """One reading of the holders of a node.

    facts: the facts of the pods among the holders.
    allocations: who holds what; Unavailable if unknown.
    fault: why the source did not answer, or not in full; "" if it did.
    sources: each part of the source with its failure, which is "" if the part answered; empty if it has no parts.
    known: the pods that the API server lists, by the id in their control groups.
    took_ms: durations of the timed parts in milliseconds.
    unresolved: held devices that this node does not have.
    unknown: why the holders of a GPU are unknown, by the GPU's uuid; its allocations are the last known ones."""

    facts: tuple[PodFacts, ...]
    allocations: tuple[Allocation, ...] | Unavailable
    fault: str = ""
    sources: tuple[tuple[str, str], ...] = ()
    known: Mapping[str, KnownPod] = msgspec.field(default_factory=dict)
    took_ms: tuple[tuple[str, int], ...] = ()
    unresolved: tuple[str, ...] = ()
    unknown: Mapping[str, str] = msgspec.field(default_factory=dict)


class HolderSource(Protocol):
    """A source of holders. One thread calls it."""

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Holdings:
        """Return the holders at `at_ms` (UTC milliseconds, never decreasing), every two seconds or so.

        gpus: the GPUs of the node, with their MIG instances."""
        ...

    def close(self) -> None:
        """Release what the source holds."""
        ...


class Drivers(Protocol):
    """The drivers of the GPUs, which a source can have closed while somebody reconfigures the GPUs."""

    def release(self, why: str) -> None:
        """Close them at the next reading, until `reacquire(why)`."""
        ...

    def reacquire(self, why: str) -> None:
        """Withdraw a release."""
        ...


class PodNames(Protocol):
    """The names of pods that are known only from the kubelet's log folders."""

    def names(self, at_ms: int) -> Mapping[str, tuple[str, str]]:
        """Return the (namespace, name) of each pod by uid."""
        ...


class NodeSurroundings(msgspec.Struct, frozen=True):
    """What the agent tells a source that it opens.

    node: the name of this node.
    tasks: the list of the agent's threads, in which a source enters its own.
    settings: the agent's settings.
    environ: the environment of the process.
    drivers: closes the drivers of the GPUs; None if there are none.
    pod_names: the names of pods from log folders; None without them."""

    node: str
    clock: Clock
    tasks: BackgroundTasks
    settings: AgentSettings
    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    drivers: Drivers | None = None
    pod_names: PodNames | None = None


class VirtualDevices(msgspec.Struct, frozen=True):
    """How a system that cuts GPUs into virtual devices of different sizes names them, and how a container states its
    part of each: by limits, which nobody can change later.

    devices: the resource that counts virtual devices, the kubelet's name for them.
    cores: the resource with the part of the cores, in per cent.
    memory: the resource with the memory, in MiB.
    memory_percent: the resource with the part of the memory, in per cent.
    separator: what stands between the uuid of the GPU and the number of the virtual device."""

    devices: str
    cores: str
    memory: str
    memory_percent: str
    separator: str = "-"

    def __post_init__(self) -> None:
        for name in self.resources:
            if re.fullmatch(_RESOURCE, str(name)) is None:
                raise ValueError(f"{str(name)[:80]!r} is no name of a resource, such as example.com/gpu-cores")
        if re.fullmatch("[-_.@]{1,4}", str(self.separator)) is None:
            raise ValueError("the separator is of the characters -_.@")

    @property
    def resources(self) -> tuple[str, ...]:
        return self.devices, self.cores, self.memory, self.memory_percent


class JobCgroups(msgspec.Struct, frozen=True):
    """Where a batch system puts the processes of its jobs in the tree of control groups.

    folders: folders of the root or of systemd's slices that only the system itself makes, because users may choose any
        name below a folder of their own; `*` is any text without `/`.
    job: what the name of a job's folder begins with; the id of the job follows.
    step: what the name of a step's folder in it begins with; "" if jobs have no steps.
    cancel: the command that ends a job, for the operator; the job's id follows. "" if there is none."""

    folders: tuple[str, ...]
    job: str = ""
    step: str = ""
    cancel: str = ""

    def __post_init__(self) -> None:
        folders: Any = self.folders  # of another package
        if not isinstance(folders, tuple) or not folders:
            raise ValueError("folders is empty")
        for folder in folders:
            if re.fullmatch(_FOLDER, str(folder)) is None or any(part.count("*") > 1 for part in folder.split("/")):
                raise ValueError(f"{str(folder)[:80]!r} is no folder, such as batch.service/jobs; a name has one *")
        for word in (self.job, self.step):
            if re.fullmatch(r"[\w.@-]{0,128}", str(word)) is None:
                raise ValueError(f"{str(word)[:80]!r} is no beginning of a folder's name, such as job_")
        if re.fullmatch(r"[\w./ -]{0,64}", str(self.cancel)) is None:
            raise ValueError(f"{str(self.cancel)[:80]!r} is no command, such as batchctl cancel")


class SourceCheck(msgspec.Struct, frozen=True):
    """What a source answered to `gputally doctor`.

    pods: the number of pods that it named.
    took_ms: how long the answer took.
    failure: why it did not answer; "" if it did."""

    pods: int = 0
    took_ms: int = 0
    failure: str = ""


class HolderPlugin(msgspec.Struct, frozen=True):
    """The manifest of a source of holders or of a way to share GPUs. It has at least one of `open`, `parts` and `jobs`.

    name: the word in the settings `holders` (a source) and `gpu_sharing` (parts), also the name of the entry point.
    reaches: what it reads, writes and connects to, for the operator.
    page: the page about it.
    place: what follows `name=` in the setting: where the source is; "" if nothing may follow.
    open: makes the source from that text; it connects to nothing yet. Returns None if whoever has a process on a GPU
        holds it. Raises SettingsError if the text is wrong.
    parts: how containers state their parts of a GPU; it counts on nodes whose `gpu_sharing` has the name.
    jobs: where the processes of jobs are.
    rights: the rights in the cluster that the agent needs for it.
    check: asks the source at a socket once, for `gputally doctor`; None if there is nothing to ask."""

    name: str
    reaches: str
    page: str
    place: str = ""
    open: Callable[[str, NodeSurroundings], HolderSource | None] | None = None
    parts: VirtualDevices | None = None
    jobs: JobCgroups | None = None
    rights: tuple[Rights, ...] = ()
    check: Callable[[Path, Clock], SourceCheck] | None = None

    def __post_init__(self) -> None:
        known_plugin_name(self.name)
        if self.open is None and self.parts is None and self.jobs is None:
            raise ValueError("it has neither open nor parts nor jobs")
