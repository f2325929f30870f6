"""Follows the kubelet, the pods and the labels of a Kubernetes node, and returns the holders of its GPUs.

Kubelet and API server each work without the other. Without the API server, pods are known by name and by their log
folders. Without the kubelet, the holders of that time are unknown. Threads follow both, and `read` returns their last
data and never waits.

NVIDIA's operator and MIG manager announce their work in labels of the node, and fail while any process has the driver
open. The labels:

| Label | The driver is closed while it is |
|---|---|
| `nvidia.com/gpu-driver-upgrade-state` | one of `…-deletion-`, `drain-`, `pod-restart-`, `reboot-required` |
| `nvidia.com/mig.config.state` | `pending`, `rebooting` |
| `nvidia.com/gpu.deploy.*` | `paused-for-…` (driver upgrade, MIG change) |
| `nvidia.com/gpu.deploy.client` | anything but `true` |

Sources: NVIDIA GPU Operator, "GPU Driver Upgrades"; NVIDIA/mig-parted reconfigure-mig; NVIDIA/k8s-driver-manager;
GPU Operator 26.7 for `gpu.deploy.client`; NVIDIA/gpu-feature-discovery and GKE for the sharing strategy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agent.core.errors import SettingsError
from agent.core.readings import KAI, Gpu, Snapshot, Unavailable
from agent.core.settings import API_OFF, Settings, comma_separated
from agent.devices.driver_lifecycle import Gpus
from agent.holders import kubernetes_api_objects
from agent.holders.device_allocations import SLICES_PATH as SLICES
from agent.holders.device_allocations import (
    Claims,
    Key,
    Node,
    NodeAllocations,
    SliceStore,
    Watched,
    find_holders,
    merge_offered,
)
from agent.holders.kubelet_client import Kubelet
from agent.holders.kubelet_pod_resources import Devices, PodResources
from agent.holders.kubernetes_api_objects import PodView
from agent.holders.lean_list_watch import PATH as PODS
from agent.holders.lean_list_watch import ApiServer, BoundPods, PodStore, Reflector, in_cluster
from agent.holders.node_snapshot import NodeSource
from agent.holders.pod_and_job_files import KnownPod, Pods
from agent.holders.process_cgroups import PodLogs, PodName, ProcessTable
from agent.wire import SharingMode
from gputally.base.background_tasks import BackgroundTasks, Work
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.holders.kubernetes_source")

PATH = "/api/v1/nodes"
_UPGRADE = "nvidia.com/gpu-driver-upgrade-state"
_UPGRADING = frozenset({"pod-deletion-required", "drain-required", "pod-restart-required", "reboot-required"})
_MIG = "nvidia.com/mig.config.state"
_RECONFIGURING = frozenset({"pending", "rebooting"})
_DEPLOY, _PAUSED = "nvidia.com/gpu.deploy.", "paused-for-"
_CLIENT = "nvidia.com/gpu.deploy.client"
_STRATEGIES = ("nvidia.com/gpu.sharing-strategy", "cloud.google.com/gke-gpu-sharing-strategy")


def release_reason(labels: Mapping[str, str]) -> str:
    """Return the label that asks for the driver, as `key=value`; "" if none does."""
    for key in sorted(labels):
        value = labels[key]
        if (
            (key == _UPGRADE and value in _UPGRADING)
            or (key == _MIG and value in _RECONFIGURING)
            or (key.startswith(_DEPLOY) and value.startswith(_PAUSED))
            or (key == _CLIENT and value != "true")
        ):
            return f"{key}={value}"[:128]
    return ""


def replica_mode(labels: Mapping[str, str]) -> SharingMode:
    """Return how the replicas of a device share it."""
    return "mps" if any(labels.get(key) == "mps" for key in _STRATEGIES) else "time-slicing"


class NodeStore:
    """The `agent.holders.lean_list_watch.Store` of one node. on_release: called with the reason to close the driver
    whenever it changes, "" if there is none. A node that is gone or unknown asks for nothing."""

    def __init__(self, node: str, on_release: Callable[[str], None]) -> None:
        self._node = node
        self._on_release = on_release
        self._labels: Mapping[str, str] = {}
        self._reason = ""

    @property
    def labels(self) -> Mapping[str, str]:
        return self._labels

    def replace(self, items: Sequence[bytes]) -> None:
        """See agent.holders.lean_list_watch.Store."""
        self._labels = {}
        for item in items:
            self._take(item)
        self._decide()

    def apply(self, change: str, item: bytes) -> None:
        """See agent.holders.lean_list_watch.Store."""
        if change == "DELETED":
            self._labels = {}
        else:
            self._take(item)
        self._decide()

    def _take(self, item: bytes) -> None:
        try:
            meta = kubernetes_api_objects.decode(item, kubernetes_api_objects.Node).metadata
        except kubernetes_api_objects.Unreadable as error:
            log.warning("a node that cannot be read", extra={"reason": str(error)[:200]})
            return
        if meta.name == self._node:
            self._labels = meta.labels or {}

    def _decide(self) -> None:
        reason = release_reason(self._labels)
        if reason != self._reason:
            log.warning("driver released" if reason else "driver opened again", extra={"label": reason or self._reason})
            self._reason = reason
            self._on_release(reason)


SYNC_MS = 30 * MS_PER_SECOND
"""How long to wait for the first list of pods. A pod that is seen before it would be billed under a temporary uid."""
KEEP_MS = MS_PER_MINUTE
"""How long a running pod keeps its devices when it is missing from the list; a restarting kubelet lists no pods until
it has heard of them again."""
_NO_VIEWS: Mapping[Key, PodView] = {}
_NO_NAMES: Mapping[str, PodName] = {}
_NOTHING_WATCHED: Watched = frozenset()
_NO_SLICES: Mapping[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True)
class _JoinInputs:
    """The inputs of the join. Most samples have the same inputs as the one before."""

    listed: list[PodResources]
    views: Mapping[Key, PodView]
    offered: Sequence[Devices]
    gpus: list[Gpu]
    mode: SharingMode
    names: Mapping[str, PodName]
    claimable: Mapping[tuple[str, str], str]
    watched: Watched
    systems: frozenset[str]

    def same_as(self, other: _JoinInputs | None) -> bool:
        """Compare with other inputs, by identity where a change makes a new object, which avoids comparing a hundred
        pods."""
        return (
            other is not None
            and self.views is other.views
            and self.offered is other.offered
            and self.names is other.names
            and self.claimable is other.claimable
            and self.watched is other.watched
            and (self.mode, self.gpus, self.listed) == (other.mode, other.gpus, other.listed)
        )

    def holding(self) -> NodeAllocations:
        uids = {(name.namespace, name.name): uid for uid, name in self.names.items()}
        return find_holders(
            self.listed,
            self.views,
            Node(self.gpus, self.offered, self.mode, uids, self.claimable, self.watched, self.systems),
        )


def _tell(name: str, error: Exception) -> None:
    log.error("a loop failed and restarts", extra={"loop": name}, exc_info=error)


class NodePods:
    """The `agent.holders.node_snapshot.Claims` of Kubernetes. pods, node, slices, claims: None if the API server is not
    used."""

    def __init__(
        self,
        kubelet: Kubelet,
        clock: Clock,
        pods: tuple[PodStore, Reflector] | None = None,
        node: tuple[NodeStore, Reflector] | None = None,
        slices: tuple[SliceStore, Reflector] | None = None,
        logs: PodLogs | None = None,
        claims: Claims | None = None,
        systems: frozenset[str] = frozenset({KAI}),
        tasks: BackgroundTasks | None = None,
    ) -> None:
        self._systems = systems
        self._tasks = tasks or BackgroundTasks(clock)
        self._claims = claims
        self._kubelet = kubelet
        self._clock = clock
        self._pods = pods
        self._node = node
        self._slices = slices
        self._logs = logs
        self._began_ms = clock.monotonic_ms()
        self._listed: dict[Key, tuple[PodResources, int]] = {}
        self._heard: Sequence[Devices] = ()
        self._offered: Sequence[Devices] = ()
        self._asked: _JoinInputs | None = None
        self._holding = NodeAllocations(())
        self._known: Mapping[str, KnownPod] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start to follow the kubelet and the API server."""
        self._start("kubelet", self._kubelet.run)
        for name, followed in (("pods", self._pods), ("node", self._node), ("slices", self._slices)):
            if followed is not None:
                self._start(name, followed[1].run)
        if self._claims is not None:
            self._start("claims", self._claims.run)

    def _start(self, name: str, work: Work) -> None:
        self._threads.append(self._tasks.start(name, work, self._stop, partial(_tell, name)))

    def close(self, wait_s: float = 2.0) -> None:
        """Stop following; threads in the middle of a request end after it."""
        self._stop.set()
        self._kubelet.close()
        if self._claims is not None:
            self._claims.close()
        for thread in self._threads:
            thread.join(timeout=wait_s)

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Pods:
        """See agent.holders.node_snapshot.Claims."""
        now_ms = self._clock.monotonic_ms()
        views = self._pods[0].views() if self._pods is not None else _NO_VIEWS
        unknown = self._kubelet.unknown_for()
        if self._pods is not None and not self._pods[1].synced and now_ms - self._began_ms < SYNC_MS:
            unknown = unknown or f"pods: {self._pods[1].failure}"
        if unknown:
            facts = self._pods[0].facts(at_ms, ()) if self._pods is not None else ()
            return Pods(facts, Unavailable(unknown), sources=self._sources(NodeAllocations(())), took_ms=self._took())
        given = self._kubelet.given()
        gone = self._pods[0].gone() if self._pods is not None else ()
        listed = [pod for pod in self._kept(given.pods, views, now_ms) if (pod.namespace, pod.name) not in gone]
        names = self._logs.names(at_ms) if self._logs is not None else _NO_NAMES
        labels = self._node[0].labels if self._node is not None else {}
        claimable = self._slices[0].uuids() if self._slices is not None else _NO_SLICES
        if given.offered is not self._heard:
            self._heard, self._offered = given.offered, merge_offered(self._offered, given.offered, gpus)
        watched = self._claims.watched(listed) if self._claims is not None else _NOTHING_WATCHED
        mode = replica_mode(labels)
        asked = _JoinInputs(listed, views, self._offered, list(gpus), mode, names, claimable, watched, self._systems)
        if not asked.same_as(self._asked):
            self._asked, self._holding, self._known = asked, asked.holding(), _known(views)
        holding = self._holding
        holders = {allocation.holder.uid for allocation in holding.allocations}
        facts = self._pods[0].facts(at_ms, holders) if self._pods is not None else ()
        return Pods(
            facts,
            holding.allocations,
            sources=self._sources(holding),
            known=self._known,
            took_ms=self._took(),
            unresolved=holding.unresolved,
            unknown=_unnumbered(gpus, holding.unresolved),
        )

    def _kept(self, pods: Sequence[PodResources], views: Mapping[Key, PodView], now_ms: int) -> list[PodResources]:
        """Return the listed pods, and running pods that disappeared from the list."""
        listed = {(pod.namespace, pod.name): pod for pod in pods}
        for key, pod in listed.items():
            self._listed[key] = pod, now_ms
        kept = list(pods)
        for key, (pod, seen_ms) in list(self._listed.items()):
            if key in listed:
                continue
            view = views.get(key)
            if view is not None and view.running and now_ms - seen_ms <= KEEP_MS:
                kept.append(pod)
            else:
                del self._listed[key]
        return kept

    def _sources(self, holding: NodeAllocations) -> tuple[tuple[str, str], ...]:
        """Return each source with its failure; `allocations` is what the others reported that matches no GPU or setting
        here."""
        odd = f"no GPU here is called {', '.join(holding.unresolved[:3])}" if holding.unresolved else ""
        if not odd and holding.unnamed:
            systems = ",".join(sorted(holding.unnamed))
            odd = f"pods share GPUs here by {systems}, which gpu_sharing does not name: shares are the kubelet's"
        found = [("kubelet", self._kubelet.given().failure), ("allocations", odd)]
        if self._pods is not None:
            found.append(("pods", self._pods[1].failure))
        if self._node is not None:
            found.append(("node", self._node[1].failure))
        if self._slices is not None and self._slices[1].synced:
            found.append(("slices", self._slices[1].failure))
        if self._claims is not None and self._claims.failure:
            found.append(("claims", self._claims.failure))
        return tuple(found)

    def _took(self) -> tuple[tuple[str, int], ...]:
        followed = (("pods", self._pods), ("node", self._node), ("slices", self._slices))
        listed = [(name, one[1].took_ms) for name, one in followed if one is not None and one[1].synced]
        return (("kubelet", self._kubelet.given().took_ms), *listed)


def _known(views: Mapping[Key, PodView]) -> dict[str, KnownPod]:
    """Return the pods by the names of their control groups; a static pod's is the hash of its configuration, not its
    uid."""
    known = {}
    for (namespace, name), view in views.items():
        known[view.facts.uid] = pod = KnownPod(view.facts.uid, namespace, name, view.container_ids)
        if view.config_hash:
            known[view.config_hash] = pod
    return known


def _unnumbered(gpus: Sequence[Gpu], unresolved: Sequence[str]) -> dict[str, str]:
    """Return the GPUs that an unresolved device may be, because their minor numbers were not read."""
    if not unresolved:
        return {}
    why = f"the driver does not tell the minor number, and {unresolved[0]} may be this GPU"
    return {gpu.uuid: why for gpu in gpus if gpu.minor is None}


class ClusterSource:
    """The `agent.devices.driver_lifecycle.DriverHolder` of a Kubernetes node: its GPUs, with the threads that follow
    their holders."""

    def __init__(self, node: NodeSource, pods: NodePods, api: ApiServer | None) -> None:
        self._node = node
        self._pods = pods
        self._api = api
        pods.start()

    def snapshot(self, at_ms: int) -> Snapshot:
        """See agent.main_loop.Source."""
        return self._node.snapshot(at_ms)

    def release(self, why: str) -> None:
        """See agent.devices.driver_lifecycle.Gpus.release."""
        self._node.release(why)

    def reacquire(self, why: str) -> None:
        """See agent.devices.driver_lifecycle.Gpus.reacquire."""
        self._node.reacquire(why)

    def close(self) -> None:
        """Stop following and close the driver."""
        if self._api is not None:
            self._api.close()
        self._pods.close()
        self._node.close()


class _LabelRelease:
    """Turns the current reason into release and reacquire."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._reason = ""

    def __call__(self, reason: str) -> None:
        before, self._reason = self._reason, reason
        if reason:
            self._gpus.release(reason)
        if before:
            self._gpus.reacquire(before)


def kubernetes_source(
    chosen: Settings,
    node: str,
    gpus: Gpus,
    clock: Clock,
    environ: Mapping[str, str],
    bound: BoundPods | None = None,
    tasks: BackgroundTasks | None = None,
) -> ClusterSource:
    """Create the source and start its threads.

    bound: the annotations that each pod had when it was bound to the node, as an earlier agent process stored them.
    tasks: the list of its threads.

    Raises SettingsError if this is not a Kubernetes node or the API server's address is invalid."""
    socket = Path(chosen.kubelet_socket)
    api = _api(chosen, socket, environ)
    kubelet = Kubelet(socket, clock)
    labels = comma_separated(chosen.pod_labels)
    systems = chosen.sharing_systems
    logs = PodLogs(Path(chosen.pod_logs))
    processes = ProcessTable(Path(chosen.proc)) if chosen.sees_processes else None
    if api is None:
        pods = NodePods(kubelet, clock, logs=logs, systems=systems, tasks=tasks)
    else:
        store = PodStore(node, labels, clock, kubelet.ask_soon, bound)
        slices = SliceStore()
        watched = NodeStore(node, _LabelRelease(gpus))
        pods = NodePods(
            kubelet,
            clock,
            (store, Reflector(api, PODS, f"spec.nodeName={node}", store, clock)),
            (watched, Reflector(api, PATH, f"metadata.name={node}", watched, clock)),
            (slices, Reflector(api, SLICES, f"spec.nodeName={node}", slices, clock, optional=True)),
            logs,
            Claims(api, clock),
            systems,
            tasks,
        )
    return ClusterSource(NodeSource(gpus, processes, pods, logs, node, clock, systems), pods, api)


def _api(chosen: Settings, socket: Path, environ: Mapping[str, str]) -> ApiServer | None:
    if chosen.api_url == API_OFF:
        log.warning("the API server is not asked: pods are known by name only")
        return None
    if chosen.api_url:
        ca_file = Path(chosen.api_ca_file) if chosen.api_ca_file else None
        return ApiServer(chosen.api_url, ca_file, Path(chosen.api_token_file) if chosen.api_token_file else None)
    if "KUBERNETES_SERVICE_HOST" not in environ and not socket.exists():
        raise SettingsError(
            f"say who holds the GPUs: this is no pod and there is no kubelet at {socket}; --standalone (what runs on "
            "them), --hpc-jobs FOLDER, --pods FILE or --simulated FILE"
        )
    return in_cluster(environ)
