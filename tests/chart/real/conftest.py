"""A real API server that logs each request with its user, and definitions of kinds from other projects.

Kinds of schedulers and of pod owners are defined without a schema, because these tests are about access rights. The
tests of the controller and of the inventory check the content."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.real.controlplane import ApiServer, api_server

RELEASE, AGENTS = "metering", "gputally-agents"
_AUDIT = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}


@dataclass
class Recorder:
    """The API server, requests of the administrator, and the server's audit log."""

    server: ApiServer
    log: Path
    _read: int = 0
    _entries: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def send(self, method: str, path: str, body: object = None, content_type: str = "application/json") -> Any:
        return self.server.request(method, path, body, content_type)

    def refused(self, method: str, path: str, body: object) -> str:
        """Return the reason for which the server refuses the request; "" if it accepts it."""
        try:
            self.send(method, path, body)
        except urllib.error.HTTPError as error:
            return str(json.load(error)["message"])
        return ""

    def make_namespace(self, name: str, **labels: str) -> None:
        self.send("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})

    def apply(self, manifest: dict[str, Any], *, dry_run: bool) -> Any:
        """Apply the manifest as `kubectl apply --server-side --validate=strict` does."""
        query = "fieldManager=helm&force=true&fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        path = f"{self.place(manifest)}/{manifest['metadata']['name']}?{query}"
        return self.send("PATCH", path, manifest, "application/apply-patch+yaml")

    def place(self, manifest: dict[str, Any]) -> str:
        """Return the path of the manifest's kind in its namespace."""
        group = manifest["apiVersion"]
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        kinds = {r["kind"]: r for r in self.send("GET", root)["resources"] if "/" not in r["name"]}
        kind = kinds[manifest["kind"]]
        space = f"/namespaces/{manifest['metadata']['namespace']}" if kind["namespaced"] else ""
        return f"{root}{space}/{kind['name']}"

    def entries(self, user: str) -> Sequence[dict[str, Any]]:
        """Return the new requests of a user and their status, oldest first."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            lines, ended, _ = log.read().rpartition(b"\n")
        self._read += len(lines + ended)
        for line in lines.splitlines():
            entry = json.loads(line)
            if entry["stage"] in {"ResponseComplete", "ResponseStarted"}:
                self._entries[entry["user"]["username"]].append(entry)
        return self._entries[user]


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    folder = tmp_path_factory.mktemp("controlplane")
    policy, log = folder / "audit.yaml", folder / "audit.log"
    policy.write_text(yaml.safe_dump(_AUDIT), "utf-8")
    audit = (f"--audit-policy-file={policy}", f"--audit-log-path={log}", "--audit-log-mode=blocking")
    with api_server(folder, "--allow-privileged=true", *audit) as server:
        found = Recorder(server, log)
        for space, level in ((RELEASE, "restricted"), (AGENTS, "privileged")):
            found.make_namespace(space, **{"pod-security.kubernetes.io/enforce": level})
        runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
        found.send("POST", "/apis/node.k8s.io/v1/runtimeclasses", runtime)
        yield found
