"""Kinds of Kubernetes objects: those every part of the controller knows, and how one is described.

The schedulers' own kinds stand with their adapters. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]
"""A Kubernetes object as plain data. Never changed in place by whoever received it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object. namespaced: objects live in namespaces. status: it has a status subresource."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = False
    status: bool = True


CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps", namespaced=True, status=False)
NODE = Kind("v1", "Node", "nodes")
POD = Kind("v1", "Pod", "pods", namespaced=True)
PRIORITY_CLASS = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", status=False)
EVENT = Kind("events.k8s.io/v1", "Event", "events", namespaced=True, status=False)
