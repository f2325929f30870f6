"""Finds the holders of a Kubernetes node's GPUs, and closes the driver while a label of the node requires it.

Threads follow the kubelet and the API server. `KubernetesSource.read` joins their last data and never waits. If the API
server does not answer within 30 s of the start, pods are known by their names and log folders only. If it fails later,
its last answers stay in use. If the kubelet does not answer, the holders are unknown.

NVIDIA's operator and MIG manager announce their work in labels of the node, and fail while any process has the driver
open. The labels:

| Label | The driver is closed while it is |
|---|---|
| `nvidia.com/gpu-driver-upgrade-state` | `pod-deletion-`, `drain-`, `pod-restart-` or `reboot-required` |
| `nvidia.com/mig.config.state` | `pending`, `rebooting` |
| `nvidia.com/gpu.deploy.*` | `paused-for-…` (driver upgrade, MIG change) |
| `nvidia.com/gpu.deploy.client` | anything but `true` |

Sources: NVIDIA GPU Operator, "GPU Driver Upgrades"; NVIDIA/mig-parted reconfigure-mig; NVIDIA/k8s-driver-manager;
GPU Operator 26.7 for `gpu.deploy.client`; NVIDIA/gpu-feature-discovery and GKE for the sharing strategy."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from agent.core.readings import Gpu, Unavailable
from agent.core.settings import API_OFF, AgentSettings, SettingsError, comma_separated
from agent.holders.kubelet import kubernetes_api_objects
from agent.holders.kubelet.device_allocations import (
    SLICES_PATHS,
    Key,
    NodeAllocations,
    NodeDevices,
    ResourceClaims,
    SliceStore,
    find_holders,
    merge_offered,
)
from agent.holders.kubelet.kubelet_grpc_client import Kubelet
from agent.holders.kubelet.kubelet_pod_resources import ContainerDevices, PodResources
from agent.holders.kubelet.kubernetes_api_objects import PodView
from agent.holders.kubelet.lean_list_watch import (
    BOUND_PODS_FILE,
    ApiServer,
    BoundPods,
    LeanReflector,
    PodStore,
    in_cluster,
)
from agent.holders.kubelet.lean_list_watch import PATH as PODS
from agent.holders.protocol import Holdings, KnownPod, NodeSurroundings, PodNames
from agent.wire import PodFacts, SharingMode
from gputally.base.background_tasks import BackgroundTasks, Work
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND

log = logging.getLogger("agent.holders.kubelet.kubernetes_source")

PATH = "/api/v1/nodes"
_UPGRADE = "nvidia.com/gpu-driver-upgrade-state"
_UPGRADING = frozenset({"pod-deletion-required", "drain-required", "pod-restart-required", "reboot-required"})
_MIG = "nvidia.com/mig.config.state"
_RECONFIGURING = frozenset({"pending", "rebooting"})
_DEPLOY, _PAUSED = "nvidia.com/gpu.deploy.", "paused-for-"
_CLIENT = "nvidia.com/gpu.deploy.client"
_STRATEGIES = ("nvidia.com/gpu.sharing-strategy", "cloud.google.com/gke-gpu-sharing-strategy")


def release_reason(labels: Mapping[str, str]) -> str:
    """Return the label that requires a closed driver, as `key=value`; "" if there is none."""
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
    """The `agent.holders.kubelet.lean_list_watch.Store` of one node's labels. A deleted node has no labels.

    on_change: is called with the previous and the new reason to close the driver when they differ; "" is no reason."""

    def __init__(self, node: str, on_change: Callable[[str, str], None]) -> None:
        self._node = node
        self._on_change = on_change
        self._labels: Mapping[str, str] = {}
        self._reason = ""

    @property
    def labels(self) -> Mapping[str, str]:
        return self._labels

    def replace(self, items: Sequence[bytes]) -> None:
        """Replace the labels by those of the listed node."""
        self._labels = {}
        for item in items:
            self._read_labels(item)
        self._update_reason()

    def apply(self, change: str, item: bytes) -> None:
        """Apply a change of the node: ADDED, MODIFIED or DELETED."""
        if change == "DELETED":
            self._labels = {}
        else:
            self._read_labels(item)
        self._update_reason()

    def _read_labels(self, item: bytes) -> None:
        try:
            meta = kubernetes_api_objects.decode(item, kubernetes_api_objects.Node).metadata
        except kubernetes_api_objects.UnreadableObject as error:
            log.warning("a node cannot be decoded", extra={"reason": str(error)[:200]})
            return
        if meta.name == self._node:
            self._labels = meta.labels or {}

    def _update_reason(self) -> None:
        before, self._reason = self._reason, release_reason(self._labels)
        if before != self._reason:
            event = "driver released because of a node label" if self._reason else "driver opened again"
            log.warning(event, extra={"label": self._reason or before})
            self._on_change(before, self._reason)


SYNC_MS = 30 * MS_PER_SECOND
"""Longest time for which the holders stay unknown because the pods have not been listed. Without the list, a pod would
get rows under a temporary uid."""
KEEP_MS = MS_PER_MINUTE
"""How long a running pod keeps its devices while it is missing from the kubelet's list; a restarting kubelet lists no
pods until it has read them again."""


def _log_failure(name: str, error: Exception) -> None:
    log.error("a loop failed and restarts", extra={"loop": name}, exc_info=error)


class KubernetesSource:
    """The `agent.holders.protocol.HolderSource` of a Kubernetes node.

    pods, node, slices: each store with the reflector that fills it. These and `claims` are None if the API server is
        not used.
    logs: finds the uids of pods that only the kubelet lists.
    systems: the sharing systems of this node.
    tasks: the list in which the threads are entered.
    api: the API server, which `close` closes."""

    def __init__(
        self,
        kubelet: Kubelet,
        clock: Clock,
        pods: tuple[PodStore, LeanReflector] | None = None,
        node: tuple[NodeStore, LeanReflector] | None = None,
        slices: tuple[SliceStore, LeanReflector] | None = None,
        logs: PodNames | None = None,
        claims: ResourceClaims | None = None,
        systems: frozenset[str] = frozenset(),
        tasks: BackgroundTasks | None = None,
        api: ApiServer | None = None,
    ) -> None:
        self._api = api
        self._systems = systems
        self._tasks = tasks or BackgroundTasks(clock)
        self._claims = claims
        self._kubelet = kubelet
        self._clock = clock
        self._pods = pods
        self._node = node
        self._slices = slices
        watched = (("pods", pods), ("node", node), ("slices", slices))
        self._reflectors: dict[str, LeanReflector] = {name: pair[1] for name, pair in watched if pair is not None}
        self._logs = logs
        self._began_ms = clock.monotonic_ms()
        self._listed: dict[Key, tuple[PodResources, int]] = {}
        """The devices of each pod, and the monotonic time at which the kubelet last listed the pod."""
        self._offered: Sequence[ContainerDevices] = ()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads that follow the kubelet and the API server."""
        self._start("kubelet", self._kubelet.run)
        for name, reflector in self._reflectors.items():
            self._start(name, reflector.run)
        if self._claims is not None:
            self._start("claims", self._claims.run)

    def _start(self, name: str, work: Work) -> None:
        self._threads.append(self._tasks.start(name, work, self._stop, partial(_log_failure, name)))

    def close(self, wait_s: float = 2.0) -> None:
        """Stop the threads and wait `wait_s` seconds for each. A thread in the middle of a request ends later."""
        if self._api is not None:
            self._api.close()
        self._stop.set()
        self._kubelet.close()
        if self._claims is not None:
            self._claims.close()
        for thread in self._threads:
            thread.join(timeout=wait_s)

    def read(self, at_ms: int, gpus: Sequence[Gpu]) -> Holdings:
        """Return the holders at `at_ms` without waiting."""
        now_ms = self._clock.monotonic_ms()
        unknown = self._kubelet.unknown_reason()
        if self._pods is not None and not self._pods[1].synced and now_ms - self._began_ms < SYNC_MS:
            unknown = unknown or f"pods: {self._pods[1].failure}"
        if unknown:
            facts = self._facts(at_ms, ())
            return Holdings(
                facts, Unavailable(unknown), sources=self._sources(NodeAllocations(())), took_ms=self._took()
            )
        views: Mapping[Key, PodView] = self._pods[0].views() if self._pods is not None else {}
        deleted = self._pods[0].deleted() if self._pods is not None else ()
        answer = self._kubelet.answer()
        self._offered = merge_offered(self._offered, answer.offered, gpus)
        listed = [pod for pod in self._holding(answer.pods, views, now_ms) if (pod.namespace, pod.name) not in deleted]
        names = self._logs.names(at_ms) if self._logs is not None else {}
        node = NodeDevices(
            gpus,
            self._offered,
            replica_mode(self._node[0].labels if self._node is not None else {}),
            {(namespace, name): uid for uid, (namespace, name) in names.items()},
            self._slices[0].devices() if self._slices is not None else {},
            self._claims.read(listed) if self._claims is not None else None,
            self._systems,
        )
        holders = find_holders(listed, views, node)
        return Holdings(
            self._facts(at_ms, {allocation.holder.uid for allocation in holders.allocations}),
            holders.allocations,
            sources=self._sources(holders),
            known=_known_pods(views),
            took_ms=self._took(),
            unresolved=holders.unresolved,
            unknown=dict(holders.unknown),
        )

    def _facts(self, at_ms: int, holders: Collection[str]) -> tuple[PodFacts, ...]:
        return self._pods[0].facts(at_ms, holders) if self._pods is not None else ()

    def _holding(self, pods: Sequence[PodResources], views: Mapping[Key, PodView], now_ms: int) -> list[PodResources]:
        """Return the pods that the kubelet lists, and running pods that it listed within the last `KEEP_MS`."""
        listed = {(pod.namespace, pod.name): pod for pod in pods}
        for key, pod in listed.items():
            self._listed[key] = pod, now_ms
        holding = list(pods)
        for key, (pod, seen_ms) in list(self._listed.items()):
            if key in listed:
                continue
            view = views.get(key)
            if view is not None and view.running and now_ms - seen_ms <= KEEP_MS:
                holding.append(pod)
            else:
                del self._listed[key]
        return holding

    def _sources(self, holders: NodeAllocations) -> tuple[tuple[str, str], ...]:
        """Return each source with its failure. The source `allocations` fails if a pod holds a device that this node
        does not have, or uses a sharing system that the settings do not name."""
        mismatch = f"no GPU here is called {', '.join(holders.unresolved[:3])}" if holders.unresolved else ""
        if not mismatch and holders.unnamed:
            systems = ",".join(sorted(holders.unnamed))
            mismatch = f"pods share GPUs by {systems}: add it to gpu_sharing; until then shares are the kubelet's"
        sources = [("kubelet", self._kubelet.answer().failure), ("allocations", mismatch)]
        # A cluster need not have ResourceSlices.
        sources += [(name, each.failure) for name, each in self._reflectors.items() if name != "slices" or each.synced]
        if self._claims is not None and self._claims.failure:
            sources.append(("claims", self._claims.failure))
        return tuple(sources)

    def _took(self) -> tuple[tuple[str, int], ...]:
        listed = [(name, reflector.took_ms) for name, reflector in self._reflectors.items() if reflector.synced]
        return (("kubelet", self._kubelet.answer().took_ms), *listed)


def _known_pods(views: Mapping[Key, PodView]) -> dict[str, KnownPod]:
    """Return the pods by the id in their control groups: the uid, and for a static pod also its configuration hash."""
    known = {}
    for (namespace, name), view in views.items():
        known[view.facts.uid] = pod = KnownPod(view.facts.uid, namespace, name, view.container_ids)
        if view.config_hash:
            known[view.config_hash] = pod
    return known


def open_node(_place: str, node: NodeSurroundings) -> KubernetesSource:
    """Create the source of a Kubernetes node and start its threads.

    Raises SettingsError if this is not a Kubernetes node, or if the API server's address or CA file cannot be used."""
    chosen, clock = node.settings, node.clock
    socket = Path(chosen.kubelet_socket)
    api = _api(chosen, socket, node.environ)
    kubelet = Kubelet(socket, clock)
    logs, systems = node.pod_names, chosen.sharing_systems
    if api is None:
        pods = KubernetesSource(kubelet, clock, logs=logs, systems=systems, tasks=node.tasks)
    else:
        spool = chosen.spool_path(node.environ, root=os.geteuid() == 0)
        bound = BoundPods(spool.with_name(BOUND_PODS_FILE))
        store = PodStore(node.node, comma_separated(chosen.pod_labels), clock, kubelet.poll_soon, bound)
        slices = SliceStore()

        def close_or_open(before: str, reason: str) -> None:
            if node.drivers is None:
                return
            if reason:
                node.drivers.release(reason)
            if before:
                node.drivers.reacquire(before)

        labels = NodeStore(node.node, close_or_open)
        pods = KubernetesSource(
            kubelet,
            clock,
            (store, LeanReflector(api, PODS, f"spec.nodeName={node.node}", store, clock)),
            (labels, LeanReflector(api, PATH, f"metadata.name={node.node}", labels, clock)),
            (slices, LeanReflector(api, SLICES_PATHS, f"spec.nodeName={node.node}", slices, clock, optional=True)),
            logs,
            ResourceClaims(api, clock),
            systems,
            node.tasks,
            api,
        )
    pods.start()
    return pods


def _api(chosen: AgentSettings, socket: Path, environ: Mapping[str, str]) -> ApiServer | None:
    if chosen.api_url == API_OFF:
        log.warning("the API server is not used: only the names of pods are known")
        return None
    if chosen.api_url:
        ca_file = Path(chosen.api_ca_file) if chosen.api_ca_file else None
        return ApiServer(chosen.api_url, ca_file, Path(chosen.api_token_file) if chosen.api_token_file else None)
    if "KUBERNETES_SERVICE_HOST" not in environ and not socket.exists():
        raise SettingsError(
            f"this machine has no kubelet ({socket}): choose the source of the holders with --holders processes, "
            "--holders jobs=FOLDER, --holders pods=FILE or --simulated FILE"
        )
    return in_cluster(environ)
