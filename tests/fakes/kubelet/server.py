"""A kubelet's PodResources server: gRPC on a Unix socket, with state that the test changes.

The messages are compiled from the .proto file in this folder when the tests run."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from grpc_tools import protoc

PROTO = Path(__file__).with_name("podresources.proto")


def compile_messages(folder: Path) -> ModuleType:
    """Compile the message classes and return their module."""
    status = protoc.main(["protoc", f"-I{PROTO.parent}", f"--python_out={folder}", str(PROTO)])
    assert status == 0
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("podresources_pb2")
    finally:
        sys.path.remove(str(folder))


class FakeKubelet:
    """Lists `pods` and offers `allocatable`. fail: the status for every call; None serves them."""

    def __init__(self, messages: ModuleType, path: Path) -> None:
        self.path = path
        self.calls: list[str] = []
        self.fail: grpc.StatusCode | None = None
        self.raw: bytes | None = None
        self._pb: Any = messages
        self._pods: dict[tuple[str, str], Any] = {}
        self._allocatable: dict[str, list[str]] = {}
        self._server: grpc.Server | None = None

    # --- state -----------------------------------------------------------------------------------

    def give(
        self,
        namespace: str,
        name: str,
        containers: Mapping[str, Mapping[str, Iterable[str]]],
        claims: Mapping[str, Iterable[tuple[str, str]]] | None = None,
    ) -> None:
        """Add a pod. containers: device ids by container name and resource. claims: (claim, device of gpu.nvidia.com)
        by container."""
        pod = self._pb.PodResources(name=name, namespace=namespace)
        for container_name, resources in containers.items():
            container = pod.containers.add(name=container_name, cpu_ids=range(8))
            for resource, ids in resources.items():
                device = container.devices.add(resource_name=resource, device_ids=list(ids))
                device.topology.nodes.add(ID=0)
            for claim, device_name in (claims or {}).get(container_name, ()):
                dynamic = container.dynamic_resources.add(claim_name=claim, claim_namespace=namespace)
                resource = dynamic.claim_resources.add(
                    driver_name="gpu.nvidia.com", pool_name="node-1", device_name=device_name
                )
                resource.cdi_devices.add(name=f"k8s.gpu.nvidia.com/claim=uid-{device_name}")
        self._pods[namespace, name] = pod

    def take(self, namespace: str, name: str) -> None:
        del self._pods[namespace, name]

    def offer(self, resource: str, ids: Iterable[str]) -> None:
        self._allocatable[resource] = list(ids)

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve on a new socket, as after a restart of the kubelet."""
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="fake kubelet"))
        calls = {"List": self._list, "GetAllocatableResources": self._offered}
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._answering(name, do)) for name, do in calls.items()}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),)
        )
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def stop(self) -> None:
        """Stop at once and remove the socket."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None
            self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeKubelet]:
        self.start()
        try:
            yield self
        finally:
            self.stop()

    # --- answers ---------------------------------------------------------------------------------

    def _answering(self, name: str, do: Any) -> Any:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.calls.append(name)
            if self.fail is not None:
                context.abort(self.fail, "rejected by rate limit" if self.fail.value[0] == 8 else "no")
            return bytes(do(request, context))

        return answer

    def _list(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if self.raw is not None:
            return self.raw
        message = self._pb.ListPodResourcesResponse(pod_resources=self._pods.values())
        return bytes(message.SerializeToString())

    def _offered(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        message = self._pb.AllocatableResourcesResponse()
        for resource, ids in self._allocatable.items():
            message.devices.add(resource_name=resource, device_ids=ids)
        return bytes(message.SerializeToString())
