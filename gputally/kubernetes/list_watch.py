"""Keeps a copy of all objects of one kind in memory by list and watch, each reduced to the value that is needed.

A `Reflector` stores only the values that its function `keep` returns, so its memory is bounded by these values and one
page of a list. Twenty thousand pods take a hundred megabytes as objects and five as values.

A list that fails continues at its page, and a watch at its version. If the server no longer has either (410), the list
begins again, at once the first time and then after a growing pause like any failure, and objects missing from it count
as deleted. Until then the old values stay. `behind` returns a reason once the server's last answer is too old.

An object that cannot be read stops no other one: it keeps its last value, if it had one, and is named in `unreadable`
until it can be read or is deleted. Whoever may write an object could otherwise stop what is known of all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Generic, TypeVar

import msgspec
import structlog

from gputally.base.background_tasks import BackgroundTask, error_summary
from gputally.base.errors import ClusterError, ClusterUnavailable, NotFound, VersionGone
from gputally.base.units import MS_PER_SECOND
from gputally.base.untrusted_text import UNDECODABLE
from gputally.kubernetes.objects import Api

PAGE = 500
"""Objects per page of a list."""


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    """Base class of decoded objects. Unknown fields are skipped, and null means missing."""


class OwnerReference(_Object, frozen=True):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class ManagedFields(_Object, frozen=True):
    """The fields that one manager owns, and the time of its last change."""

    time: datetime | None = None
    fields: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="fieldsV1")


class Metadata(_Object, frozen=True):
    """The metadata that every object has."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None
    managed_fields: list[ManagedFields] | None = None


class ListMetadata(_Object, frozen=True):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class NamedObject(_Object, frozen=True):
    """An object of any kind, reduced to its metadata."""

    metadata: Metadata


class _Identity(_Object, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class _Identified(_Object, frozen=True):
    """An object reduced to what the API server itself writes, which is readable whatever its owner wrote."""

    metadata: _Identity


_identified = msgspec.json.Decoder(_Identified)


O = TypeVar("O")  # noqa: E741  # the object as decoded
V = TypeVar("V")
WATCH_SECONDS = 300
"""How long the server keeps a watch open."""
MOST_BEHIND_SECONDS = 2 * WATCH_SECONDS
"""Age of the values above which they must not be used: twice the length of a watch. A working server answers at least
once in a watch."""
MOST_FAULT = 200
"""Characters of a message about an object that cannot be read, which may quote what its owner wrote."""
PAUSE_SECONDS = 1
"""Pause between two watches."""
ABSENT_SECONDS = 60
"""Pause before the next list of a kind that the server does not serve. Its definition may be installed later."""
BACKOFF_SECONDS = (1, 2, 4, 8, 16, 30)
"""Pauses after the first, second, … failure in a row; the last one repeats."""


class _Page(msgspec.Struct):
    metadata: ListMetadata
    items: list[msgspec.Raw] | None = None


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_status = msgspec.json.Decoder(_Status)


class Reflector(Generic[O, V]):
    """Keeps one value for each object of a kind. Any thread may call `values`; one thread calls all other methods.

    path: the path of the list.
    decode: the type to which an object is decoded.
    keep: returns the value of an object; None to keep none.
    changed: is called with the uid and the value of every object whose value changes. The value is None if the object
        is deleted or has no value any more. If it fails, the object is named in `unreadable`, and `changed` is called
        again when the object is read the next time.
    metadata_only: True to read objects without spec and status.
    others: further paths of the kind, for servers that do not serve it at `path`.
    optional: True if the server need not serve the kind.
    now_ms: returns the time, for `heard_ms` and `behind`; None if these are not used."""

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
        self._page = msgspec.json.Decoder(_Page)
        self._line = msgspec.json.Decoder(_Line)
        self._object = msgspec.json.Decoder(decode)
        self._keep = keep
        self._on_change = changed
        self._log = structlog.get_logger("gputally.kubernetes.api_client")
        self._lock = threading.Lock()
        self._values: dict[str, V] = {}
        self._incoming: dict[str, V] = {}
        self._unreadable: dict[str, str] = {}
        self._incoming_unreadable: dict[str, str] = {}
        self._continue = ""
        self._version = ""
        self.heard_ms: int | None = None
        """When the values were last those of the server: after a whole list, and during a watch; None before."""
        self.failures = 0
        self.fault: str | None = None
        """Why the last request failed; None if it succeeded."""
        self._task: BackgroundTask | None = None
        self.synced = False
        """True once a complete list has been read."""

    def values(self) -> Mapping[str, V]:
        """Return a copy of the current values, by uid."""
        with self._lock:
            return dict(self._values)

    def unreadable(self) -> Mapping[str, str]:
        """Return the objects that cannot be read, by uid, each as "namespace/name: reason"."""
        with self._lock:
            return dict(self._unreadable)

    def behind(self) -> str | None:
        """Return why the values must not be used for decisions; None if they may be used."""
        kind, fault = self.path.rpartition("/")[2], f": {self.fault}" if self.fault else ""
        if not self.synced or self.heard_ms is None or self._now_ms is None:
            return f"{kind} have not been read yet{fault}"
        age_s = (self._now_ms() - self.heard_ms) / MS_PER_SECOND
        return f"{kind} were last read {age_s:.0f} s ago{fault}" if age_s > MOST_BEHIND_SECONDS else None

    def prime(self) -> None:
        """Read the list once, at the first path at which the server serves it. After a failure, `run` tries again."""
        for _ in range(self.path_count):
            try:
                self.sync()
            except ClusterError as error:
                if self.absent(error):
                    continue
                self.fault = str(error)
            return

    def sync(self) -> None:
        """Read the list up to its end if it has not been read yet. Begin at the page at which an earlier call failed.
        Raises ClusterError. If the server has lost a page, the list begins again, once; the next call begins it again
        too."""
        begun_again = False
        while not self._version:
            query = {"limit": str(PAGE), **({"continue": self._continue} if self._continue else {})}
            try:
                page = self._decoded(
                    self._page.decode, self._api.get(self.path, query, metadata_only=self._metadata_only)
                )
            except VersionGone:
                first, begun_again = bool(self._continue) and not begun_again, True
                self._begin_list()
                if not first:
                    raise
                continue
            for item in page.items or ():
                uid, value, fault = self._read(item)
                if value is not None:
                    self._incoming[uid] = value
                if fault is not None:
                    self._incoming_unreadable[uid] = fault
            self._begin_run()
            before, self._continue = self._continue, page.metadata.continue_ or ""
            if self._continue and self._continue == before:
                self._begin_list()
                raise ClusterUnavailable(
                    f"{self.path}: the list does not go on: each page names itself as the next one"
                )
            if not self._continue:
                self._replace(page.metadata.resource_version)
                self._heard()

    def follow(self) -> None:
        """Apply the changes of one watch until the server ends it. Raises ClusterError. After VersionGone, the next
        `sync` reads the whole list again."""
        query = {
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        try:
            self._end_run()  # a long time without a line is not a fault; the connection has a time limit
            for raw in self._api.watch(self.path, query, metadata_only=self._metadata_only):
                self._begin_run()
                self._apply_line(raw)
                self._heard()
                self._end_run()
            self._heard()
        except VersionGone:
            self._version = ""
            raise

    def run(self, stop: threading.Event, task: BackgroundTask | None = None) -> None:
        """Call `sync` and `follow` in turn until `stop` is set. Log a failure, and try again after a growing pause.

        task: has a fault after an answer that cannot be processed, until a later one is processed, and while a request
            takes longer than the task's time limit. An error of the API server is no fault of the task; `heard_ms` and
            `failures` show it."""
        log, self._task = self._log, task
        failures = absent = 0
        gone = False
        while not stop.is_set():
            self._begin_run()
            try:
                self.sync()
                self.follow()
                failures, gone = 0, False
                self._end_run()
                stop.wait(PAUSE_SECONDS)
            except ClusterError as error:
                self._end_run()
                path = self.path
                if isinstance(error, VersionGone) and not gone:  # once; a server that says so again is failing
                    gone = True
                    log.info("cluster_list_begins_again", path=path, reason=str(error))
                    continue
                if self.absent(error):
                    absent += 1
                    if absent % self.path_count == 0:
                        log.debug("cluster_has_no_such_kind", path=path)
                        stop.wait(ABSENT_SECONDS)
                    continue
                self.failures, self.fault = self.failures + 1, str(error)
                log.warning("cluster_not_read", path=self.path, reason=str(error))
                stop.wait(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
                failures += 1
            except Exception as error:
                self.failures += 1
                self._version = ""
                self._begin_list()
                if task is not None:
                    task.fail(error)
                log.exception("cluster_not_understood", path=self.path, reason=error_summary(error))
                stop.wait(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
                failures += 1

    def _begin_run(self) -> None:
        if self._task is not None:
            self._task.begin()

    def _end_run(self) -> None:
        if self._task is not None:
            self._task.succeed()

    @property
    def path_count(self) -> int:
        """The number of paths at which a server may serve the kind."""
        return 1 + len(self._others)

    def absent(self, error: ClusterError) -> bool:
        """Return True if the error means that the server does not serve this optional kind at `path`. Then use the next
        of the other paths from now on."""
        absent = self._optional and isinstance(error, NotFound)
        if absent:
            self._others.append(self.path)
            self.path = self._others.pop(0)
            self._heard()
        return absent

    def _heard(self) -> None:
        """Record that the values are those of the server."""
        self._begin_run()
        self.fault = None
        if self._now_ms is not None:
            self.heard_ms = self._now_ms()

    def _apply_line(self, raw: bytes) -> None:
        """Apply one line of a watch to the values. Raises VersionGone, ClusterUnavailable."""
        line = self._decoded(self._line.decode, raw)
        if line.type == "ERROR":
            status = self._decoded(_status.decode, bytes(line.object))
            if status.code == 410:
                raise VersionGone(f"{self.path}: {status.message}")
            raise ClusterUnavailable(f"{self.path}: {status.code} {status.message}")
        meta = self._decoded(_identified.decode, line.object).metadata
        if line.type == "DELETED":
            self._set(meta.uid, None, None)
        elif line.type != "BOOKMARK":
            self._set(*self._read(line.object))
        self._version = meta.resource_version

    def _read(self, raw: msgspec.Raw) -> tuple[str, V | None, str | None]:
        """Return an object's uid, its value, and why it cannot be read; then the value is its last one, if any."""
        try:
            item = self._object.decode(raw)
            return _uid(item), self._keep(item), None
        except Exception as error:  # noqa: BLE001 - whatever its owner wrote, the other objects count
            meta = self._decoded(_identified.decode, raw).metadata
            fault = f"{meta.namespace}/{meta.name}: {error_summary(error)[:MOST_FAULT]}"
            if meta.uid not in self._unreadable:
                self._log.warning("cluster_object_unreadable", path=self.path, object=fault)
            return meta.uid, self._values.get(meta.uid), fault

    def _begin_list(self) -> None:
        self._continue, self._incoming, self._incoming_unreadable = "", {}, {}

    def _set(self, uid: str, value: V | None, fault: str | None) -> None:
        with self._lock:
            before = self._values.get(uid)
            if value is None:
                self._values.pop(uid, None)
            else:
                self._values[uid] = value
            # The function `changed` may have failed for this value; then it is called again.
            again = fault is None and self._unreadable.pop(uid, None) is not None
            if fault is not None:
                self._unreadable[uid] = fault
        if value != before or again:
            self._changed(uid, value)

    def _replace(self, version: str) -> None:
        with self._lock:
            before, self._values = self._values, self._incoming
            again, self._unreadable = self._unreadable, self._incoming_unreadable
        self._begin_list()
        for uid in before.keys() - self._values.keys():
            self._changed(uid, None)
        for uid, value in self._values.items():
            if before.get(uid) != value or (uid in again and uid not in self._unreadable):
                self._changed(uid, value)
        self._version = version
        self.synced = True

    def _changed(self, uid: str, value: V | None) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(uid, value)
        except Exception as error:  # noqa: BLE001 - a defect at one object stops no other
            self._log.exception("cluster_object_not_processed", path=self.path, uid=uid)
            with self._lock:
                self._unreadable[uid] = f"{uid}: {error_summary(error)[:MOST_FAULT]}"

    def _decoded(self, decode: Callable[[bytes], T], raw: bytes) -> T:
        try:
            return decode(raw)
        except UNDECODABLE as error:
            raise ClusterUnavailable(f"{self.path}: unexpected answer of the API server: {error}") from error


T = TypeVar("T")


def _uid(item: object) -> str:
    """Return the uid of an object. item: a decoded object, or a dictionary."""
    if isinstance(item, dict):
        return str(item["metadata"]["uid"])
    metadata: Metadata = item.metadata  # type: ignore[attr-defined]  # every decoded object has metadata
    return metadata.uid
