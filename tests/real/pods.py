"""Runs the container of a workload's pod as a process of this machine, as a kubelet would.

Arguments, environment and volumes come from the API server's objects.

On a machine without containers a folder stands in for each volume, the loopback address for the name of a Service, and
a kubeconfig with a token of the pod's account for the pod's own access to the API server."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real.controlplane import ApiServer
from tests.real.programs import running

Object = dict[str, Any]


def selected(affinity: Object, labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels matches a pod's required node affinity, by the scheduler's rule."""

    def holds(rule: Object) -> bool:
        value = labels.get(rule["key"])
        return value is not None and (rule["operator"] == "Exists" or value in rule["values"])

    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return any(all(map(holds, term["matchExpressions"])) for term in required["nodeSelectorTerms"])


@dataclass
class LocalPod:
    """A pod of a workload's template. stands_in: regular expressions for arguments, with their replacements; None
    removes the argument. more: further environment."""

    server: ApiServer
    folder: Path
    workload: Object
    name: str
    node: str
    stands_in: Mapping[str, str | None] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.namespace = self.workload["metadata"]["namespace"]
        template = self.workload["spec"]["template"]
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self.folder.mkdir(parents=True)
        # On the server the pod is a name that tokens are bound to; volumes are not its business.
        spec = {key: self.spec[key] for key in ("serviceAccountName", "enableServiceLinks")}
        spec |= {"nodeName": self.node, "containers": [{"name": self.container["name"], "image": "none"}]}
        body = {"metadata": {"name": self.name, "labels": template["metadata"]["labels"]}, "spec": spec}
        self._send("POST", "pods", body)
        self.mount()

    def mount(self) -> None:
        """Write the current content of every volume from the API server."""
        for volume in self.spec["volumes"]:
            for name, text in self._content(volume).items():
                file = self._place(volume["name"]) / name
                fresh = file.with_name(f".{name}")
                fresh.write_bytes(text)
                fresh.replace(file)

    @contextlib.contextmanager
    def run(self) -> Iterator[Path]:
        """Run the container's program until the block ends. Yields its log."""
        log = self.folder / "log"
        own = {e["name"]: self._here(e["value"]) for e in self.container["env"] if "value" in e}
        environment = {**os.environ, **own, "NODE_NAME": self.node, **self.more}
        with running([sys.executable, "-m", "gputally", *self._arguments()], log, environment) as started:
            assert started.poll() is None, log.read_text()
            yield log

    def token(self, audience: str, *, bound: bool = True) -> str:
        """Return a token of the pod's account, requested as the kubelet does."""
        account = self.spec["serviceAccountName"]
        return self.server.token(self.namespace, account, audience, self.name if bound else "")

    def _arguments(self) -> Sequence[str]:
        found: list[str] = []
        for argument in self.container["args"]:
            text: str | None = self._here(argument)
            for pattern, other in self.stands_in.items():
                if text is not None and re.search(pattern, text):
                    text = None if other is None else re.sub(pattern, other, text)
            found += [] if text is None else [text]
        return found

    def _here(self, text: str) -> str:
        """Replace the container's folders by those of this machine, the longest path first."""
        mounts = sorted(self.container["volumeMounts"], key=lambda mount: -len(mount["mountPath"]))
        for mount in mounts:
            pattern = rf"(?<![\w/]){re.escape(mount['mountPath'])}(?=/|$)"
            if re.search(pattern, text):
                return re.sub(pattern, str(self._place(mount["name"])), text)
        return text

    def _place(self, volume: str) -> Path:
        place = self.folder / "volumes" / volume
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _content(self, volume: Object) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for source in volume.get("projected", {}).get("sources", [volume]):
            if "serviceAccountToken" in source:
                asked = source["serviceAccountToken"]
                found[asked["path"]] = self.token(asked.get("audience", "https://localhost")).encode()
            elif "secret" in source:
                wanted = source["secret"]
                data = self._send("GET", f"secrets/{wanted['secretName']}")["data"]
                found |= {i["path"]: base64.b64decode(data[i["key"]]) for i in wanted["items"]}
            elif source.get("configMap", {}).get("name") == "kube-root-ca.crt":
                found["ca.crt"] = self.server.ca_file.read_bytes()  # which a controller would have put there
            elif "configMap" in source:
                wanted = source["configMap"]
                data = self._send("GET", f"configmaps/{wanted['name']}")["data"]
                items = wanted.get("items") or [{"key": key, "path": key} for key in data]
                found |= {i["path"]: data[i["key"]].encode() for i in items}
        return found

    def _send(self, method: str, path: str, body: object = None) -> Any:
        return self.server.request(method, f"/api/v1/namespaces/{self.namespace}/{path}", body)
