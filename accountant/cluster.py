"""A real Kubernetes API server as `accountant.inventory.kube.Api`: the only importer of `kubernetes` here.

Plain REST over the client's own transport (authentication, TLS, token renewal). Answers are handed on as
bytes; what is no answer becomes one of accountant.errors with the server's own words. Reads, and reviews
of tokens and rights: nothing here changes a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

from accountant.errors import ClusterRefused, ClusterUnavailable, ResourceGone

_JSON = "application/json"
_METADATA = f"{_JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST = f"{_JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_CHUNK = 64 * 1024
MOST_LINE_BYTES = 8 * 2**20
"""Longest line of a watch; an object in etcd is at most 1.5 MiB."""
_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class KubernetesApi:
    """Talks to the API server behind `api`. Thread-safe, as the client's connection pool is."""

    def __init__(self, api: client.ApiClient, *, timeout_s: float = 30.0, watch_s: float = 330.0) -> None:
        """watch_s: silence after which a watch is given up; above the time the server keeps one open."""
        self._api = api
        self._timeout_s = timeout_s
        self._watch_s = watch_s

    @classmethod
    def connect(cls, kubeconfig: Path | None = None) -> KubernetesApi:
        """The cluster this pod runs in, else that of the kubeconfig. Raises ClusterUnavailable where neither is."""
        settings = client.Configuration()
        try:
            if kubeconfig is None and _IN_CLUSTER.exists():
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            else:
                config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=str(kubeconfig) if kubeconfig else None, client_configuration=settings
                )
        except (config.ConfigException, OSError) as error:
            raise ClusterUnavailable(f"no cluster: {error}") from error
        return cls(client.ApiClient(settings))

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        response = self._send("GET", path, query, accept=_accept(metadata_only, "limit" in query))
        with _translated():
            content: bytes = response.read()
        return content

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        response = self._send("POST", path, {}, body)
        with _translated():
            content: bytes = response.read()
        return content

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        asked = {**query, "watch": "true"}
        response = self._send("GET", path, asked, accept=_accept(metadata_only, False), timeout_s=(10.0, self._watch_s))
        raw = response.response
        rest = b""
        try:
            with _translated():
                for chunk in raw.stream(_CHUNK):
                    *lines, rest = (rest + chunk).split(b"\n")
                    if len(rest) > MOST_LINE_BYTES:
                        raise ClusterUnavailable(
                            f"GET {path}: a line of the watch is longer than {MOST_LINE_BYTES} bytes"
                        )
                    yield from (line for line in lines if line)
        finally:
            # What is left unread cannot be read by the connection's next user.
            raw.close()

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, object] | None = None,
        *,
        accept: str = _JSON,
        timeout_s: float | tuple[float, float] | None = None,
    ) -> Any:
        headers = {"Accept": accept, **({"Content-Type": _JSON} if body is not None else {})}
        with _translated():
            request = self._api.param_serialize(
                method,
                path,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response: Any = self._api.call_api(*request, _request_timeout=timeout_s or self._timeout_s)
            if not 200 <= response.status < 300:
                raise _error(method, path, response.status, response.read())
        return response


class _translated:  # noqa: N801  # used like a function
    """Failures of the transport as the accountant's own."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, client.ApiException | urllib3.exceptions.HTTPError | OSError):
            text = str(error).strip().splitlines()
            raise ClusterUnavailable(
                f"the API server does not answer: {text[0] if text else type(error).__name__}"
            ) from error


def _accept(metadata_only: bool, listing: bool) -> str:
    """The server answers 406 where a list is asked for as one object, or one object as a list."""
    return _JSON if not metadata_only else _METADATA_LIST if listing else _METADATA


def _error(method: str, path: str, status: int, content: bytes) -> ClusterUnavailable:
    """The server's Status as an exception."""
    try:
        text = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        text = content[:200].decode(errors="replace") or "no reason given"
    message = f"{method} {path}: {status}: {' '.join(text.split())}"
    if status == 410:
        return ResourceGone(message)
    if status in (408, 429) or status >= 500:
        return ClusterUnavailable(message)
    return ClusterRefused(message, status)
