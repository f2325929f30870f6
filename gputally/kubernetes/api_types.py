"""Defines the calls that list-watch makes on the Kubernetes API, and the fields that every object has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Protocol

import msgspec

PAGE = 500
"""Objects asked for at a time."""


class Api(Protocol):
    """An API server. Every call raises gputally.base.errors.ClusterUnavailable or one of its kinds."""

    def get(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> bytes:
        """One answer. metadata_only: objects without spec and status."""
        ...

    def watch(self, path: str, query: Mapping[str, str], *, metadata_only: bool = False) -> Iterator[bytes]:
        """The lines of a watch, until the server ends it."""
        ...

    def post(self, path: str, body: Mapping[str, object]) -> bytes:
        """Create an object; the answer."""
        ...


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
