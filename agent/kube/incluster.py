"""The agent's source on a Kubernetes node, put together from the settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from agent.clock import Clock
from agent.driver.gpus import Gpus
from agent.errors import SettingsError
from agent.kube.apiserver import ApiServer, in_cluster
from agent.kube.boundpods import BoundPods
from agent.kube.claims import Claims
from agent.kube.nodepods import NodePods
from agent.kube.nodewatch import PATH as NODES
from agent.kube.nodewatch import NodeStore
from agent.kube.podlogs import PodLogs
from agent.kube.podwatch import PATH as PODS
from agent.kube.podwatch import PodStore
from agent.kube.reflector import Reflector
from agent.kube.resourceslices import PATH as SLICES
from agent.kube.resourceslices import SliceStore
from agent.kubelet import Kubelet
from agent.model import Snapshot
from agent.node import NodeSource
from agent.processes import ProcessTable
from agent.settings import API_OFF, Settings, listed

log = logging.getLogger("agent.kube.incluster")


class ClusterSource:
    """`agent.driver.release.Holding` of a Kubernetes node: its GPUs, with the threads that follow who holds them."""

    def __init__(self, node: NodeSource, pods: NodePods, api: ApiServer | None) -> None:
        self._node = node
        self._pods = pods
        self._api = api
        pods.start()

    def snapshot(self, at_ms: int) -> Snapshot:
        """See agent.loop.Source."""
        return self._node.snapshot(at_ms)

    def release(self, why: str) -> None:
        """See agent.driver.gpus.Gpus.release."""
        self._node.release(why)

    def reacquire(self, why: str) -> None:
        """See agent.driver.gpus.Gpus.reacquire."""
        self._node.reacquire(why)

    def close(self) -> None:
        """Stop following, let go of the driver."""
        if self._api is not None:
            self._api.close()
        self._pods.close()
        self._node.close()


class _LabelRelease:
    """Turns the reason of the moment into release and reacquire."""

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
    chosen: Settings, node: str, gpus: Gpus, clock: Clock, environ: Mapping[str, str], bound: BoundPods | None = None
) -> ClusterSource:
    """bound: what pods declared when they were bound, as an earlier process noted it.

    Starts its threads. Raises SettingsError where this is no Kubernetes node or the API server's address is none."""
    socket = Path(chosen.kubelet_socket)
    api = _api(chosen, socket, environ)
    kubelet = Kubelet(socket, clock)
    labels = listed(chosen.pod_labels)
    systems = chosen.sharing_systems
    logs = PodLogs(Path(chosen.pod_logs))
    processes = ProcessTable(Path(chosen.proc)) if chosen.sees_processes else None
    if api is None:
        pods = NodePods(kubelet, clock, logs=logs, systems=systems)
    else:
        store = PodStore(node, labels, clock, kubelet.ask_soon, bound)
        slices = SliceStore()
        watched = NodeStore(node, _LabelRelease(gpus))
        pods = NodePods(
            kubelet,
            clock,
            (store, Reflector(api, PODS, f"spec.nodeName={node}", store, clock)),
            (watched, Reflector(api, NODES, f"metadata.name={node}", watched, clock)),
            (slices, Reflector(api, SLICES, f"spec.nodeName={node}", slices, clock, optional=True)),
            logs,
            Claims(api, clock),
            systems,
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
