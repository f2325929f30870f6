"""Reading from the Kubernetes API server: one page of a list, the lines of a watch. Plain HTTPS, no client.

The Kubernetes client would cost every node 40 MiB for two requests. The service account's token is read
again when the kubelet renews its file; lines and pages are bounded; a dead network is noticed by TCP's
keep-alive long before a watch would time out. It must not know what an object means.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode

from agent.errors import AgentError, SettingsError, TokenUnavailable
from agent.kube import apijson
from agent.shipping.transport import TokenFile, connection_to

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_PAGE_BYTES = 64 * 1024 * 1024
MAX_LINE_BYTES = 4 * 1024 * 1024
"""An object is at most 1.5 MiB (source: etcd's request limit)."""
TIMEOUT_S = 30.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class ApiUnavailable(AgentError):
    """The API server did not answer, or not with what was asked for. status: of the answer, 0 without one."""

    def __init__(self, reason: str, status: int = 0, retry_after_s: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after_s = retry_after_s


class ApiServer:
    """url: https://host:port. ca_file: PEM of its authorities. token_file: None where it wants none.

    Each request has a connection of its own, so threads may share it. Raises SettingsError for a url or a
    CA file that cannot be used."""

    def __init__(self, url: str, ca_file: Path | None, token_file: Path | None) -> None:
        connection_to(url, ca_file, TIMEOUT_S)  # refused now rather than by every request
        self._url = url
        self._ca_file = ca_file
        self._token = TokenFile(token_file) if token_file is not None else None
        self._mutex = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = False

    def page(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """The whole answer to a GET. Raises ApiUnavailable."""
        with self._request(path, parameters, TIMEOUT_S) as response:
            data = response.read(MAX_PAGE_BYTES + 1)
            if len(data) > MAX_PAGE_BYTES:
                raise ApiUnavailable(f"an answer larger than {MAX_PAGE_BYTES} bytes")
            return data

    def lines(self, path: str, parameters: Mapping[str, str], timeout_s: float) -> Iterator[bytes]:
        """The answer to a GET line by line as it comes, at most `timeout_s` apart. Raises ApiUnavailable."""
        with self._request(path, parameters, timeout_s) as response:
            while line := response.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ApiUnavailable(f"a line larger than {MAX_LINE_BYTES} bytes")
                yield line

    def close(self) -> None:
        """Break off what is going on; nothing can be asked afterwards. From any thread."""
        with self._mutex:
            self._closed = True
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _request(
        self, path: str, parameters: Mapping[str, str], timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection, prefix = connection_to(self._url, self._ca_file, timeout_s)
        try:
            headers = {"Accept": "application/json", "User-Agent": "gputally-agent"}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token.read()}"
            connection.connect()
            self._watch_over(connection)
            connection.request("GET", f"{prefix}{path}?{urlencode(parameters)}", headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            yield response
        except TokenUnavailable as error:
            raise ApiUnavailable(str(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ApiUnavailable(f"API server unreachable: {_reason(error)}") from error
        finally:
            with self._mutex:
                self._open.discard(connection)
            connection.close()

    def _watch_over(self, connection: http.client.HTTPConnection) -> None:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._mutex:
            if self._closed:
                raise ApiUnavailable("closed")
            self._open.add(connection)


def in_cluster(environ: Mapping[str, str], account: Path = ACCOUNT) -> ApiServer:
    """The API server of the cluster this container runs in. Raises SettingsError outside of one.

    Source: kubernetes.io, "Accessing the Kubernetes API from a Pod"."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError("not in a cluster: KUBERNETES_SERVICE_HOST is not set")
    if ":" in host:
        host = f"[{host}]"
    return ApiServer(f"https://{host}:{port}", account / "ca.crt", account / "token")


def _refused(response: http.client.HTTPResponse) -> ApiUnavailable:
    try:
        said = apijson.decode(response.read(64 * 1024), apijson.Status).message[:200]
    except apijson.Unreadable:
        said = response.reason
    after = response.getheader("Retry-After", "").strip()
    retry_after_s = min(int(after[:6]), 3600) if after.isascii() and after.isdigit() else 0
    return ApiUnavailable(f"API server: HTTP {response.status} {said}", response.status, retry_after_s)


def _reason(error: BaseException) -> str:
    return str(error.args[-1]) if error.args else type(error).__name__
