"""Keeps the objects of one kind in memory by list and watch, reduced by a given function.

Only what `keep` makes of an object is held, so memory is bounded by what is kept and one page. A list that
breaks off goes on at the page it had come to; a watch goes on at the version it had come to; where the
server no longer has either (410), the list begins again and what is missing from it counts as deleted.

Twenty thousand pods are a hundred megabytes as objects and five as values; nothing fetches them again. The
copy is level-triggered: whatever breaks (the watch ends, a version is too old, the API server is away), the
next list makes it whole, and meanwhile it keeps what it had. `behind` says when that is too long ago.

Runs in a thread of its own; `held` may be called from any. `Metadata` has the fields of every object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Generic, TypeVar

import msgspec
import structlog

from gputally.base.background_tasks import BackgroundTask, described
from gputally.base.errors import ClusterError, NotFound, Unavailable, VersionGone
from gputally.base.units import MS_PER_SECOND
from gputally.kubernetes.objects import Api

PAGE = 500
"""Objects asked for at a time."""


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    """Unknown fields are skipped; null stands for what is left out."""


class OwnerReference(_Object, frozen=True):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class ManagedFields(_Object, frozen=True):
    """The fields that one manager wrote, and when it last changed one of them."""

    time: datetime | None = None
    fields: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="fieldsV1")


class Metadata(_Object, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None
    managed_fields: list[ManagedFields] | None = None


class ListMetadata(_Object, frozen=True):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class NamedObject(_Object, frozen=True):
    """Any object, as far as its metadata go."""

    metadata: Metadata


O = TypeVar("O")  # noqa: E741  # the object as decoded
V = TypeVar("V")
WATCH_SECONDS = 300
"""How long the server keeps a watch open."""
MOST_BEHIND_SECONDS = 2 * WATCH_SECONDS
"""A server that is there answers once in a watch at least; after twice that, nothing is decided by what was seen."""
PAUSE_SECONDS = 1
"""Least time between two watches."""
ABSENT_SECONDS = 60
"""Until a kind that the server does not serve is looked for again: its definition may be installed later."""
BACKOFF_SECONDS = (1, 2, 4, 8, 16, 30)


class _Page(msgspec.Struct, Generic[O]):
    metadata: ListMetadata
    items: list[O] | None = None


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_status = msgspec.json.Decoder(_Status)


class Reflector(Generic[O, V]):
    """Values of one kind by uid. `held` may be read from any thread; all else belongs to one.

    decode: the object's struct. keep: what to hold of it, None: nothing. changed: told every change, with
    None for an object that is gone (or is no longer one to keep). others: where the kind is served by servers that
    do not have it at `path`. optional: a server without the kind is no failure. now_ms: for `heard_ms`, `behind`."""

    def __init__(
        self,
        api: Api,
        path: str,
        decode: type[O],
        keep: Callable[[O], V | None],
        changed: Callable[[str, V | None], None] | None = None,
        *,
        metadata_only: bool = False,
        others: Sequence[str] = (),
        optional: bool = False,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        self._api = api
        self._others = list(others)
        self._optional = optional
        self._now_ms = now_ms
        self.path = path
        self._metadata_only = metadata_only
        self._page = msgspec.json.Decoder(_Page[decode])  # type: ignore[valid-type]
        self._line = msgspec.json.Decoder(_Line)
        self._object = msgspec.json.Decoder(decode)
        self._meta = msgspec.json.Decoder(NamedObject)
        self._keep = keep
        self._tell = changed
        self._lock = threading.Lock()
        self._held: dict[str, V] = {}
        self._incoming: dict[str, V] = {}
        self._continue = ""
        self._version = ""
        self.heard_ms: int | None = None
        """When the server last answered, None before."""
        self.failures = 0
        self.fault: str | None = None
        """What the last request failed of; None while all is well."""
        self._task: BackgroundTask | None = None
        self.synced = False
        """Whether a whole list has been seen."""

    def held(self) -> Mapping[str, V]:
        """A copy of what there is now."""
        with self._lock:
            return dict(self._held)

    def behind(self) -> str | None:
        """Why nothing may be decided by what it holds; None: it may."""
        kind, why = self.path.rpartition("/")[2], f": {self.fault}" if self.fault else ""
        if not self.synced or self.heard_ms is None or self._now_ms is None:
            return f"{kind} have not been read yet{why}"
        age_s = (self._now_ms() - self.heard_ms) / MS_PER_SECOND
        return f"{kind} are as they were {age_s:.0f} s ago{why}" if age_s > MOST_BEHIND_SECONDS else None

    def prime(self) -> None:
        """`sync` as far as it goes now; `run` tries again."""
        try:
            self.sync()
        except ClusterError as error:
            self.fault = str(error)

    def sync(self) -> None:
        """Make the list complete; goes on where an earlier call broke off. Raises ClusterError."""
        while not self._version:
            query = {"limit": str(PAGE), **({"continue": self._continue} if self._continue else {})}
            try:
                page = self._decoded(
                    self._page.decode, self._api.get(self.path, query, metadata_only=self._metadata_only)
                )
                self._heard()
            except VersionGone:
                if not self._continue:
                    raise
                self._continue, self._incoming = "", {}
                continue
            for item in page.items or ():
                value = self._keep(item)
                if value is not None:
                    self._incoming[_uid(item)] = value
            self._continue = page.metadata.continue_ or ""
            if not self._continue:
                self._replace(page.metadata.resource_version)

    def follow(self) -> None:
        """One watch until the server ends it. Raises ClusterError; after VersionGone `sync` begins anew."""
        query = {
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        try:
            self._well()  # no line for long is no fault, and the connection has a time limit
            for raw in self._api.watch(self.path, query, metadata_only=self._metadata_only):
                self._progress()
                self._take(raw)
                self._heard()
                self._well()
            self._heard()
        except VersionGone:
            self._version = ""
            raise

    def run(self, stop: threading.Event, task: BackgroundTask | None = None) -> None:
        """Sync and follow until `stop` is set; failures are logged and tried again, later each time.

        task: has a fault while an answer of the server cannot be dealt with, and where none comes for longer than a
        watch lasts. A server that does not answer is no fault of the task: `heard_ms` and `failures` tell of it."""
        log = structlog.get_logger("gputally.kubernetes.api_client")
        self._task = task
        failures = absent = 0
        while not stop.is_set():
            self._progress()
            try:
                self.sync()
                self.follow()
                failures = 0
                self._well()
                stop.wait(PAUSE_SECONDS)
            except VersionGone as error:
                log.info("cluster_list_begins_again", path=self.path, reason=str(error))
                self._well()
            except ClusterError as error:
                self._well()
                path = self.path
                if self.absent(error):
                    absent += 1
                    if absent % self.places == 0:
                        log.debug("cluster_has_no_such_kind", path=path)
                        stop.wait(ABSENT_SECONDS)
                    continue
                self.failures, self.fault = self.failures + 1, str(error)
                log.warning("cluster_not_read", path=self.path, reason=str(error))
                stop.wait(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
                failures += 1
            except Exception as error:
                self.failures += 1
                self._version, self._continue, self._incoming = "", "", {}
                if task is not None:
                    task.fail(error)
                log.exception("cluster_not_understood", path=self.path, reason=described(error))
                stop.wait(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
                failures += 1

    def _progress(self) -> None:
        if self._task is not None:
            self._task.begin()

    def _well(self) -> None:
        if self._task is not None:
            self._task.succeed()

    @property
    def places(self) -> int:
        """How many paths the kind may have."""
        return 1 + len(self._others)

    def absent(self, error: ClusterError) -> bool:
        """Whether this only says that the server does not have an optional kind; the next try is elsewhere."""
        gone = self._optional and isinstance(error, NotFound)
        if gone:
            self._others.append(self.path)
            self.path = self._others.pop(0)
            self._heard()
        return gone

    def _heard(self) -> None:
        self._progress()
        self.fault = None
        if self._now_ms is not None:
            self.heard_ms = self._now_ms()

    def _take(self, raw: bytes) -> None:
        line = self._decoded(self._line.decode, raw)
        if line.type == "ERROR":
            status = self._decoded(_status.decode, bytes(line.object))
            if status.code == 410:
                raise VersionGone(f"{self.path}: {status.message}")
            raise Unavailable(f"{self.path}: {status.code} {status.message}")
        meta = self._decoded(self._meta.decode, bytes(line.object)).metadata
        if line.type != "BOOKMARK":
            value = (
                None if line.type == "DELETED" else self._keep(self._decoded(self._object.decode, bytes(line.object)))
            )
            self._set(meta.uid, value)
        self._version = meta.resource_version

    def _set(self, uid: str, value: V | None) -> None:
        with self._lock:
            before = self._held.get(uid)
            if value is None:
                self._held.pop(uid, None)
            else:
                self._held[uid] = value
        if value != before:
            self._changed(uid, value)

    def _replace(self, version: str) -> None:
        with self._lock:
            before, self._held = self._held, self._incoming
        self._incoming = {}
        for uid in before.keys() - self._held.keys():
            self._changed(uid, None)
        for uid, value in self._held.items():
            if before.get(uid) != value:
                self._changed(uid, value)
        self._version = version
        self.synced = True

    def _changed(self, uid: str, value: V | None) -> None:
        if self._tell is not None:
            self._tell(uid, value)

    def _decoded(self, decode: Callable[[bytes], T], raw: bytes) -> T:
        try:
            return decode(raw)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"{self.path}: not what an API server answers: {error}") from error


T = TypeVar("T")


def _uid(item: object) -> str:
    """The UID of a decoded object, or of one as plain data."""
    if isinstance(item, dict):
        return str(item["metadata"]["uid"])
    found: Metadata = item.metadata  # type: ignore[attr-defined]  # every object has them
    return found.uid
