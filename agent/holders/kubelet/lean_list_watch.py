"""Lists and watches objects of the API server over plain HTTPS, and keeps this node's pods in memory.

The Kubernetes client would cost every node 40 MiB for two requests. `ApiServer` reads the service account's token again
when the kubelet renews its file, and limits the size of lines and pages. TCP's keep-alive detects a dead network long
before a watch would time out.

`LeanReflector` continues a watch from the last resource version after every break. Bookmarks advance the version while
nothing happens. 410 Gone means that the version is too old; then `LeanReflector` lists all objects again. It backs off
after failures, with jitter, so that a thousand nodes do not return at once. Meanwhile the known objects stay, and
`failure` gives the reason why they may be old. Source: kubernetes.io, "Efficient detection of changes".

`PodStore` gives the sampling thread a snapshot of the pods without waiting, also of pods that started and ended between
two samples. Its memory is limited.

`BoundPods` stores the queue, and the part of a shared GPU, that each pod declared when it was bound to this node. A
scheduler reads the fraction, GPU memory and GPU group of a pod from its annotations and labels once, when it binds the
pod. The owner of the pod can change them later, so the values that the agent first saw on this node count. A file
beside the spool keeps them over a restart of the agent, each with a checksum."""

from __future__ import annotations

import contextlib
import http.client
import logging
import random
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

import msgspec

from agent.core.lean_http_client import BearerToken, TokenUnavailable, connection_to, failure_reason, read_answer
from agent.core.settings import SettingsError
from agent.holders.kubelet import kubernetes_api_objects
from agent.holders.kubelet.kubernetes_api_objects import PodView, UnreadableObject
from agent.wire import PodFacts
from gputally.base import atomic_file
from gputally.base.background_tasks import BackgroundTask
from gputally.base.clock import Clock
from gputally.base.errors import AgentError
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND
from gputally.base.untrusted_text import UNDECODABLE
from gputally.kubernetes.pod_queue_labels import all_shared_gpu_keys, declaring_keys

log = logging.getLogger("agent.holders.kubelet.lean_list_watch")

BOUND_PODS_FILE = "bound-pods.json"
MAX_PODS = 5_000


class _DeclaredSharing(msgspec.Struct, frozen=True, array_like=True):
    fraction: str
    memory_mib: str
    groups: tuple[str, ...]
    queue_ref: str


_decoder = msgspec.json.Decoder(tuple[str, _DeclaredSharing])


class BoundPods:
    """Stores the queue and the part of a GPU that each pod declared when it was bound. Not thread-safe: one reflector
    owns it.

    file: the file that keeps them over a restart; None keeps them in this process only."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._declared: dict[str, _DeclaredSharing] = {}
        self._refused: set[str] = set()
        if file is not None:
            try:
                kept = atomic_file.load_entries(file)
                self._declared = dict(map(_decoder.decode, kept.entries))
                damage = kept.damage
            except (OSError, *UNDECODABLE) as error:
                damage = str(error)
            if damage:
                log.warning(
                    "parts that pods declared when they were bound cannot be read: the present parts of these pods "
                    "count",
                    extra={"reason": damage},
                )

    def as_bound(self, view: PodView) -> PodView:
        """Return the pod with the queue and the part that it declared when it was bound."""
        if not view.bound or not (view.shares_by or view.wants_gpu or view.facts.uid in self._declared):
            return view
        uid = view.facts.uid
        now = _DeclaredSharing(view.fraction, view.memory_mib, view.groups, view.facts.queue_ref)
        known = self._declared.get(uid)
        if known is None:
            if len(self._declared) < MAX_PODS:
                self._declared[uid] = now
                self._save()
            return view
        if known == now:
            return view
        has_part = known.fraction or known.memory_mib
        if has_part and not known.groups and now.groups:
            # The scheduler sets the group when it binds the pod.
            known = self._declared[uid] = msgspec.structs.replace(known, groups=now.groups)
            self._save()
        if known != now and uid not in self._refused:
            self._refused.add(uid)
            log.warning(
                "a pod's queue or declared part was changed after the pod was bound: the change does not count",
                extra={"namespace": view.facts.namespace, "pod": view.facts.name},
            )
        keys = declaring_keys(view.shares_by)
        declared = {key for each in all_shared_gpu_keys() for key in (each.fraction, each.memory)}
        requests = {key: text for key, text in view.facts.requests.items() if key not in declared}
        requests |= {
            key: text
            for key, text in ((keys.fraction, known.fraction), (keys.memory, known.memory_mib))
            if key and text
        }
        facts = msgspec.structs.replace(view.facts, requests=dict(sorted(requests.items())), queue_ref=known.queue_ref)
        wants = bool(facts.requests or known.groups or view.wants_gpu)
        return replace(
            view,
            facts=facts,
            fraction=known.fraction,
            memory_mib=known.memory_mib,
            groups=known.groups,
            wants_gpu=wants,
        )

    def keep_only(self, uids: Iterable[str]) -> None:
        """Remove all other pods."""
        self.remove(self._declared.keys() - set(uids))

    def remove(self, uids: Collection[str]) -> None:
        """Remove these pods."""
        known = self._declared.keys() & uids
        for uid in known:
            del self._declared[uid]
        self._refused -= known
        if known:
            self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            atomic_file.save_entries(self._file, map(msgspec.json.encode, self._declared.items()), 0o600)
        except OSError as error:
            log.warning(
                "the parts that pods declared when they were bound cannot be stored: a restart forgets them",
                extra={"reason": str(error)},
            )


ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_PAGE_BYTES = 64 * 1024 * 1024
MAX_LINE_BYTES = 4 * 1024 * 1024
"""An object is at most 1.5 MiB (source: etcd's request limit)."""
TIMEOUT_S = 30.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class ApiUnavailable(AgentError):
    """The API server did not answer, or it refused the request.

    status: HTTP status of the answer; 0 without an answer.
    retry_after_s: the server's Retry-After in seconds; 0 if it sent none."""

    def __init__(self, reason: str, status: int = 0, retry_after_s: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after_s = retry_after_s


class ApiServer:
    """A client of the API server. Each request has a connection of its own, so threads may share the client.

    url: https://host:port.
    ca_file: PEM file of the CAs to trust; None trusts the system's.
    token_file: file with the bearer token; None sends no token.

    Raises SettingsError for a URL or a CA file that cannot be used."""

    def __init__(self, url: str, ca_file: Path | None, token_file: Path | None) -> None:
        connection_to(url, ca_file, TIMEOUT_S)  # invalid values fail here instead of at every request
        self._url = url
        self._ca_file = ca_file
        self._token = BearerToken(token_file) if token_file is not None else None
        self._mutex = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = False

    def page(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """Send a GET and return the whole answer. Raises ApiUnavailable."""
        with self._request(path, parameters, TIMEOUT_S) as response:
            data = read_answer(response, MAX_PAGE_BYTES, TIMEOUT_S)
            if len(data) > MAX_PAGE_BYTES:
                raise ApiUnavailable(f"the answer is larger than {MAX_PAGE_BYTES} bytes")
            return data

    def lines(self, path: str, parameters: Mapping[str, str], timeout_s: float) -> Iterator[bytes]:
        """Send a GET and yield the lines of the answer as they arrive. Raises ApiUnavailable, also if no data arrives
        for `timeout_s`."""
        with self._request(path, parameters, timeout_s) as response:
            while line := response.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ApiUnavailable(f"a line of the answer is larger than {MAX_LINE_BYTES} bytes")
                yield line

    def close(self) -> None:
        """Cancel running requests and refuse further ones. Any thread may call this."""
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
            self._register(connection)
            connection.request("GET", f"{prefix}{path}?{urlencode(parameters)}", headers=headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise _refusal(response)
                yield response
        except TokenUnavailable as error:
            raise ApiUnavailable(str(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ApiUnavailable(f"API server unreachable: {failure_reason(error)}") from error
        finally:
            with self._mutex:
                self._open.discard(connection)
            connection.close()

    def _register(self, connection: http.client.HTTPConnection) -> None:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._mutex:
            if self._closed:
                raise ApiUnavailable("the client is closed")
            self._open.add(connection)


def in_cluster(environ: Mapping[str, str], account: Path = ACCOUNT) -> ApiServer:
    """Return a client of the cluster in which this container runs. Raises SettingsError outside a cluster.

    Source: kubernetes.io, "Accessing the Kubernetes API from a Pod"."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError(
            "the API server's address is unknown, because KUBERNETES_SERVICE_HOST is not set: run the agent in a pod, "
            "or set --api-url (`off`: no API server is used)"
        )
    if ":" in host:
        host = f"[{host}]"
    return ApiServer(f"https://{host}:{port}", account / "ca.crt", account / "token")


def _refusal(response: http.client.HTTPResponse) -> ApiUnavailable:
    try:
        reason = kubernetes_api_objects.decode(
            read_answer(response, 64 * 1024, TIMEOUT_S), kubernetes_api_objects.ApiStatus
        ).message[:200]
    except kubernetes_api_objects.UnreadableObject:
        reason = response.reason
    after = response.getheader("Retry-After", "").strip()
    retry_after_s = min(int(after[:6]), 3600) if after.isascii() and after.isdigit() else 0
    return ApiUnavailable(f"API server: HTTP {response.status} {reason}", response.status, retry_after_s)


PAGE_ITEMS = 500
WATCH_S = 300
"""Time after which the server ends a watch, plus or minus a fifth."""
SHORT_MS = MS_PER_SECOND
"""A watch that ends within this time without a line is a failure, and with lines the next one waits, because repeating
it at once would be a busy loop."""
BACKOFF_BASE_MS = MS_PER_SECOND
BACKOFF_CAP_MS = MS_PER_MINUTE
GONE_AGAIN_MS = 3 * BACKOFF_CAP_MS
"""A version that is too old again within this time is a failure. It is longer than the longest pause."""
ABSENT_MS = 10 * MS_PER_MINUTE
"""Time between two requests for objects of a kind that the cluster does not have."""
FORBIDDEN, NOT_FOUND, GONE = 403, 404, 410
_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
_SYSTEM_RANDOM = random.SystemRandom()


class ListWatchApi(Protocol):
    """The requests that this module and `agent.holders.kubelet.device_allocations` send, as in `ApiServer`."""

    def page(self, path: str, parameters: Mapping[str, str]) -> bytes: ...
    def lines(self, path: str, parameters: Mapping[str, str], timeout_s: float) -> Iterator[bytes]: ...


class Store(Protocol):
    """Keeps the objects that a reflector reads. Items are JSON. A store skips an item that it cannot decode."""

    def replace(self, items: Sequence[bytes]) -> None:
        """Replace all objects."""
        ...

    def apply(self, change: str, item: bytes) -> None:
        """Apply a change: ADDED, MODIFIED or DELETED."""
        ...


class LeanReflector:
    """Keeps `store` equal to the objects at a path that the field selector `selector` selects.

    path: the path, or the paths of an API's versions, the newest first. The first one that the server has is used.

    synced: True once the objects have been listed.
    failure: why the latest request failed; "" if it succeeded.
    took_ms: duration of the last list.
    jitter: returns a random number from 0 to 1.
    optional: True if the cluster need not have objects of this kind."""

    def __init__(
        self,
        api: ListWatchApi,
        path: str | Sequence[str],
        selector: str,
        store: Store,
        clock: Clock,
        jitter: Callable[[], float] = _SYSTEM_RANDOM.random,
        *,
        optional: bool = False,
    ) -> None:
        self._optional = optional
        self.synced = False
        self.failure = "not listed yet"
        self.took_ms = 0
        self._api = api
        self._paths = (path,) if isinstance(path, str) else tuple(path)
        self._path = self._paths[0]
        self._selector = {"fieldSelector": selector}
        self._store = store
        self._task = BackgroundTask("watch", clock)
        self._clock = clock
        self._jitter = jitter
        self._version = ""
        self._failures = 0
        self._warned = False
        self._gone_ms: int | None = None
        """When the version was last too old or unusable."""
        self._gones = 0
        """How often in a row it was within `GONE_AGAIN_MS`, beyond the first time."""

    def run(self, stop: threading.Event, task: BackgroundTask) -> None:
        """Repeat `step` until `stop` is set, with pauses after failures."""
        self._task = task
        while not stop.is_set():
            task.begin()
            pause_ms = self.step()
            task.succeed()
            if pause_ms:
                self._clock.wait(pause_ms / MS_PER_SECOND, stop)

    def step(self) -> int:
        """List the objects if necessary, then watch them until the watch ends. Return the milliseconds to wait before
        the next step."""
        try:
            if not self._version:
                self._list()
            return self._watch()
        except (ApiUnavailable, kubernetes_api_objects.UnreadableObject) as error:
            return self._record_failure(error)

    def _list(self) -> None:
        items: list[bytes] = []
        more, began_ms = "", self._clock.monotonic_ms()
        while True:
            # For version 0 the server answers from its cache, which finds one node's pods without reading all pods.
            page = {"limit": str(PAGE_ITEMS), "continue": more} if more else {"resourceVersion": "0"}
            listing = kubernetes_api_objects.decode(
                self._api.page(self._path, {**self._selector, **page}), kubernetes_api_objects.Listing
            )
            items += [bytes(item) for item in listing.items or ()]
            before, more = more, listing.metadata.more
            if not more:
                break
            if more == before:
                raise ApiUnavailable("the list does not go on: each page names itself as the next one")
        self._store.replace(items)
        self._version = listing.metadata.resource_version
        self.took_ms = self._clock.monotonic_ms() - began_ms
        self.synced = True
        self.failure = ""

    def _watch(self) -> int:
        """Apply the changes of one watch until it ends. Return the milliseconds to wait before the next one."""
        lasts_s = round(WATCH_S * (0.8 + 0.4 * self._jitter()))
        parameters = {
            **self._selector,
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(lasts_s),
        }
        began_ms, quiet = self._clock.monotonic_ms(), True
        self._task.succeed()  # a long time without a line is not a fault; the connection has a time limit
        for line in self._api.lines(self._path, parameters, lasts_s + 30):
            self._task.begin()
            self._apply(kubernetes_api_objects.decode(line, kubernetes_api_objects.WatchEvent))
            quiet = False
        short = self._clock.monotonic_ms() - began_ms < SHORT_MS
        if quiet and short:
            raise ApiUnavailable("the watch ended as soon as it began")
        self._record_success()
        return SHORT_MS if short else 0

    def _apply(self, event: kubernetes_api_objects.WatchEvent) -> None:
        if event.type == "ERROR":
            status = kubernetes_api_objects.decode(event.object, kubernetes_api_objects.ApiStatus)
            raise ApiUnavailable(f"watch: {status.message or status.reason}"[:200], status.code)
        version = kubernetes_api_objects.resource_version(event.object)
        if event.type in _CHANGES:
            self._store.apply(event.type, bytes(event.object))
        self._version = version or self._version
        self._record_success()

    def _record_success(self) -> None:
        if self._warned:
            log.info("watching the API server works again", extra={"path": self._path})
        self._failures, self._warned = 0, False
        self.failure = ""

    def _record_failure(self, error: ApiUnavailable | kubernetes_api_objects.UnreadableObject) -> int:
        status = error.status if isinstance(error, ApiUnavailable) else GONE
        if status == NOT_FOUND and self._optional:
            self._version, self.failure = "", ""
            self._path = self._paths[(self._paths.index(self._path) + 1) % len(self._paths)]
            return ABSENT_MS if self._path == self._paths[0] else 0
        if status == GONE:
            self._version = ""  # the version is too old or unusable: list everything again
            again = self._gone_ms is not None and self._clock.monotonic_ms() - self._gone_ms < GONE_AGAIN_MS
            self._gone_ms, self._gones = self._clock.monotonic_ms(), self._gones + 1 if again else 0
            if not self._gones and not self._failures:
                self._failures = 1
                return 0
            # Lines that arrive between two such answers are no success, else the lists would follow without a pause.
            self._failures = max(self._failures, self._gones)
        self._failures += 1
        if not self._warned:
            self._warned = True
            log.warning("watching the API server fails: trying again", extra={"path": self._path, "reason": str(error)})
        self.failure = str(error)
        ceiling = min(BACKOFF_CAP_MS, BACKOFF_BASE_MS << min(self._failures - 1, 16))
        if status == FORBIDDEN:
            ceiling = BACKOFF_CAP_MS  # granting a missing right takes longer
        retry_after_ms = error.retry_after_s * MS_PER_SECOND if isinstance(error, ApiUnavailable) else 0
        return max(ceiling // 2 + round(self._jitter() * ceiling / 2), retry_after_ms)


PATH = "/api/v1/pods"
DELETED_KEPT_MS = 5 * MS_PER_MINUTE
"""How long `PodStore` reports the facts of a deleted pod."""
Key = tuple[str, str]


class PodStore:
    """The `Store` of one node's pods.

    labels: keys of labels, or patterns with `*`, that the agent sends to the accountant.
    on_change: is called after each list, and after each change of a pod that requests a GPU.
    bound: the parts that pods declared when they were bound; None stores them in this process only."""

    def __init__(
        self,
        node: str,
        labels: Sequence[str],
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
        bound: BoundPods | None = None,
    ) -> None:
        self._bound = bound or BoundPods()
        self._node = node
        self._labels = labels
        self._clock = clock
        self._on_change = on_change
        self._mutex = threading.Lock()
        self._views: dict[Key, PodView] = {}
        self._deleted: dict[str, tuple[PodView, int]] = {}
        """Deleted pods by uid, each with the monotonic time until which its facts are reported."""

    def replace(self, items: Sequence[bytes]) -> None:
        """Replace all pods. A known pod that is missing counts as deleted now."""
        views = {view.key: view for item in items[:MAX_PODS] if (view := self._read(item)) is not None}
        with self._mutex:
            for key, view in self._views.items():
                if key not in views or views[key].facts.uid != view.facts.uid:
                    self._mark_deleted(view)
            self._views = views
        self._bound.keep_only(view.facts.uid for view in views.values())
        self._on_change()

    def apply(self, change: str, item: bytes) -> None:
        """Apply a change of a pod: ADDED, MODIFIED or DELETED."""
        view = self._read(item)
        if view is None:
            return
        with self._mutex:
            views = dict(self._views)
            known = views.get(view.key)
            if change == "DELETED":
                if known is None or known.facts.uid == view.facts.uid:
                    views.pop(view.key, None)
                self._bound.remove({view.facts.uid})
                self._mark_deleted(view)
            elif view.key in views or len(views) < MAX_PODS:
                if known is not None and known.facts.uid != view.facts.uid:
                    self._mark_deleted(known)
                views[view.key] = view
            self._views = views
        if view.wants_gpu:
            self._on_change()

    def views(self) -> Mapping[Key, PodView]:
        """Return the pods by namespace and name. Do not modify the mapping."""
        return self._views

    def deleted(self) -> Collection[Key]:
        """Return namespace and name of recently deleted pods."""
        with self._mutex:
            return {view.key for view, _ in self._deleted.values()} - self._views.keys()

    def facts(self, at_ms: int, holders: Collection[str]) -> tuple[PodFacts, ...]:
        """Return the facts of pods that request a GPU or whose uid is in `holders`, including pods that were deleted
        within the last `DELETED_KEPT_MS`."""
        now_ms = self._clock.monotonic_ms()
        with self._mutex:
            for uid in [uid for uid, (_, until_ms) in self._deleted.items() if until_ms <= now_ms]:
                del self._deleted[uid]
            views = [*self._views.values(), *(view for view, _ in self._deleted.values())]
        facts = {v.facts.uid: v.facts for v in views if v.wants_gpu or v.facts.uid in holders}
        return tuple(msgspec.structs.replace(facts[uid], observed_ms=at_ms) for uid in sorted(facts))

    def _read(self, item: bytes) -> PodView | None:
        try:
            return self._bound.as_bound(kubernetes_api_objects.read(item, self._node, self._labels))
        except UnreadableObject as error:
            log.warning("a pod cannot be decoded", extra={"reason": str(error)[:200]})
            return None

    def _mark_deleted(self, view: PodView) -> None:
        if len(self._deleted) >= MAX_PODS:
            del self._deleted[next(iter(self._deleted))]
        ended_ms = view.facts.ended_ms or self._clock.wall_ms()
        facts = msgspec.structs.replace(view.facts, ended_ms=ended_ms)
        until_ms = self._clock.monotonic_ms() + DELETED_KEPT_MS
        self._deleted[facts.uid] = replace(view, facts=facts, over=True, running=False), until_ms
