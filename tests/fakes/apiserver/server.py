"""A small Kubernetes API server: pods and nodes with resource versions, lists, field selectors and watches.

It behaves as kube-apiserver does in everything the agent can observe. Resource versions are cluster-wide, a watch
starts after the version it is given and ends after `timeoutSeconds`, and a compacted version gets 410. The same tests
run on a real server."""

from __future__ import annotations

import copy
import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gputally.testing.http_server import Handler, LoopbackServer

Object = dict[str, Any]
Key = tuple[str, str, str]
TOKEN = "token-of-the-agent"
RESOURCES = {
    "/api/v1/pods": "Pod",
    "/api/v1/nodes": "Node",
}
_SLICES = re.compile("/apis/resource.k8s.io/([^/]+)/resourceslices")
_CLAIM = re.compile("/apis/resource.k8s.io/([^/]+)/namespaces/([^/]+)/resourceclaims/([^/]+)")


class FakeApiServer:
    """requests: paths with their queries. refuse: the status for every request; None serves them.
    dra_versions: the versions of resource.k8s.io that it serves; it does not convert objects."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.refuse: tuple[int, dict[str, str]] | None = None
        self.token = TOKEN
        self.dra_versions = {"v1"}
        self.page_items = 0
        self._changed = threading.Condition()
        self._version = 1
        self._oldest = 0
        self._objects: dict[Key, Object] = {}
        self._log: list[tuple[int, str, Object]] = []
        self._cut = 0
        self._stopping = False
        outer = self

        class Requests(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.requests.append(self.path)
                outer._answer(self)

        self._server = LoopbackServer(Requests)
        self.url = self._server.url

    # --- state -----------------------------------------------------------------------------------

    def put(self, thing: Object) -> None:
        """Create or replace an object."""
        kind, meta = thing["kind"], thing["metadata"]
        key = kind, meta.get("namespace", ""), meta["name"]
        with self._changed:
            self._version += 1
            stored = copy.deepcopy(thing)
            stored["metadata"]["resourceVersion"] = str(self._version)
            self._log.append((self._version, "MODIFIED" if key in self._objects else "ADDED", stored))
            self._objects[key] = stored
            self._changed.notify_all()

    def delete(self, kind: str, namespace: str, name: str) -> None:
        with self._changed:
            self._version += 1
            gone = copy.deepcopy(self._objects.pop((kind, namespace, name)))
            gone["metadata"]["resourceVersion"] = str(self._version)
            self._log.append((self._version, "DELETED", gone))
            self._changed.notify_all()

    def compact(self) -> None:
        """Drop the history: a watch that starts before now gets 410."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._log.clear()
            self._changed.notify_all()

    def cut(self) -> None:
        """Break off all watches, as a restart does."""
        with self._changed:
            self._cut += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._server.close()

    # --- answers ---------------------------------------------------------------------------------

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if self.refuse is not None:
            status, headers = self.refuse
            return self._refused(request, status, "refused", headers)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return self._refused(request, 401, "Unauthorized", {})
        claim, slices = _CLAIM.fullmatch(parts.path), _SLICES.fullmatch(parts.path)
        if claim is not None and claim[1] in self.dra_versions:
            return self._get(request, ("ResourceClaim", claim[2], claim[3]))
        kind = "ResourceSlice" if slices and slices[1] in self.dra_versions else RESOURCES.get(parts.path)
        if kind is None:
            return self._refused(request, 404, "the server could not find the requested resource", {})
        if query.get("watch"):
            return self._watch(request, kind, query)
        return self._list(request, kind, query)

    def _refused(self, request: BaseHTTPRequestHandler, status: int, message: str, headers: dict[str, str]) -> None:
        self._send(request, status, _status(status, message), headers)

    def _get(self, request: BaseHTTPRequestHandler, key: Key) -> None:
        with self._changed:
            thing = self._objects.get(key)
        if thing is None:
            return self._refused(request, 404, f"{key[2]} not found", {})
        return self._send(request, 200, thing, {})

    def _list(self, request: BaseHTTPRequestHandler, kind: str, query: dict[str, str]) -> None:
        with self._changed:
            version = str(self._version)
            items = [o for k, o in sorted(self._objects.items()) if k[0] == kind and _chosen(o, query)]
        start = int(query.get("continue", "0"))
        meta: Object = {"resourceVersion": version}
        if self.page_items and len(items) > start + self.page_items:
            meta["continue"] = str(start + self.page_items)
        shown = items[start : start + self.page_items] if self.page_items else items
        self._send(request, 200, {"kind": f"{kind}List", "apiVersion": "v1", "metadata": meta, "items": shown}, {})

    def _watch(self, request: BaseHTTPRequestHandler, kind: str, query: dict[str, str]) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        sent = int(query["resourceVersion"])
        cut = self._cut
        while True:
            with self._changed:
                if sent < self._oldest:
                    self._line(request, {"type": "ERROR", "object": _status(410, f"too old resource version: {sent}")})
                    break
                news = [entry for entry in self._log if entry[0] > sent]
                if not news:
                    if self._stopping or self._cut != cut:
                        request.close_connection = True
                        return
                    self._changed.wait(10)
                    continue
            for version, change, thing in news:
                if thing["kind"] == kind and _chosen(thing, query):
                    self._line(request, {"type": change, "object": thing})
                sent = version
            meta = {"resourceVersion": str(sent)}
            self._line(request, {"type": "BOOKMARK", "object": {"kind": kind, "metadata": meta}})
        request.wfile.write(b"0\r\n\r\n")

    def _line(self, request: BaseHTTPRequestHandler, event: Object) -> None:
        data = json.dumps(event).encode() + b"\n"
        request.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        request.wfile.flush()

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: Object, headers: dict[str, str]) -> None:
        data = json.dumps(body).encode()
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def _chosen(thing: Object, query: dict[str, str]) -> bool:
    name, _, value = query.get("fieldSelector", "").partition("=")
    found = {"spec.nodeName": thing.get("spec", {}).get("nodeName"), "metadata.name": thing["metadata"]["name"]}
    return not name or found[name] == value
