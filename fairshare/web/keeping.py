"""Where the policy file stands, and the ways in which a page may change it, where the operator named one.

Nothing is written over what somebody else wrote meanwhile: a write says what it found, and is
refused where that is gone.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Protocol

from agent import wholefile
from fairshare.errors import ClusterError, FairshareError
from fairshare.kube.kinds import CONFIG_MAP, Object
from fairshare.kube.ports import Objects

FIELD_MANAGER = "gputally-pages"
KEY = "policy.yaml"
"""Of the ConfigMap."""


class NotKept(FairshareError):
    """The policy could not be written, and why."""


class Changed(NotKept):
    """The file is no longer the one that the form was opened on."""


def digest(text: str) -> str:
    """What a form remembers of the file it was opened on."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Keeper(Protocol):
    """One way to write it. when: until when the controller has it, for people."""

    when: str

    def write(self, text: str, before: str) -> None:
        """Replace it at once, or not at all. before: digest of what should stand there. Raises NotKept."""
        ...


class PolicyPlace:
    """The file that the controller reads. keeper None: pages do not write it."""

    def __init__(self, path: Path, keeper: Keeper | None = None) -> None:
        self._path = path
        self._keeper = keeper
        self._lock = threading.Lock()

    @property
    def writable(self) -> bool:
        return self._keeper is not None

    @property
    def when(self) -> str:
        return self._keeper.when if self._keeper is not None else ""

    @property
    def name(self) -> str:
        """As people know it."""
        return self._path.name

    @property
    def path(self) -> str:
        return str(self._path)

    def read(self) -> str:
        """Raises NotKept."""
        return _read(self._path)

    def write(self, text: str, before: str) -> None:
        """As a keeper's, one at a time. Raises NotKept."""
        if self._keeper is None:
            raise NotKept("pages do not write the policy here: commit the file instead")
        with self._lock:
            self._keeper.write(text, before)


class FileKeeper:
    """The file itself, replaced atomically with the rights that it has."""

    when = "before its next cycle"

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str, before: str) -> None:
        if digest(_read(self._path)) != before:
            raise Changed(f"{self._path} has changed since the form was opened: open it again")
        try:
            # A link stays one: what it leads to is replaced.
            wholefile.write(self._path.resolve(), text.encode())
        except OSError as error:
            raise NotKept(f"{self._path}: {error.strerror or error}") from error


class ConfigMapKeeper:
    """The ConfigMap that the file is mounted from: a person asks for it, so the field is taken over and then written.

    Both at the version that was read: whoever writes between makes it a conflict."""

    when = "as soon as the kubelet has brought it, about a minute"

    def __init__(self, cluster: Objects, namespace: str, name: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name

    def write(self, text: str, before: str) -> None:
        try:
            standing = self._cluster.get(CONFIG_MAP, self._name, self._namespace)
            current = (standing.get("data") or {}).get(KEY)
            if not isinstance(current, str) or digest(current) != before:
                place = f"ConfigMap {self._namespace}/{self._name}"
                raise Changed(f"{place}: its {KEY} is not what the form was opened on: open it again in a minute")
            taken = self._object(current, standing["metadata"]["resourceVersion"])
            owned = self._cluster.transfer(taken, field_manager=FIELD_MANAGER)
            fresh = self._object(text, owned["metadata"]["resourceVersion"])
            self._cluster.apply(fresh, field_manager=FIELD_MANAGER)
        except ClusterError as error:
            raise NotKept(str(error)) from error

    def _object(self, text: str, version: str) -> Object:
        return {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": {"name": self._name, "namespace": self._namespace, "resourceVersion": version},
            "data": {KEY: text},
        }


def keeper(setting: str, path: Path, cluster: Objects) -> Keeper | None:
    """The one that `pages_apply` names."""
    if setting == "file":
        return FileKeeper(path)
    if setting:
        namespace, _, name = setting.removeprefix("configmap:").partition("/")
        return ConfigMapKeeper(cluster, namespace, name)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotKept(f"{path}: {getattr(error, 'strerror', None) or error}") from error
