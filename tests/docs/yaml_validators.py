"""Checks each YAML block of a page with the validator of the program that reads such a file.

A page often shows a part of a file. `whole` adds the parts that every such file needs, so that the validator reads what
a user has after pasting the block into a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml
from pydantic import BaseModel

from accountant.cli.invoice_lines import InstanceMap
from accountant.core.settings import Settings
from accountant.fleet.fleet_ledgers import Rates
from accountant.inventory.inventory_file import InventoryFile
from accountant.notifications.subscriptions import DeliveriesFile
from accountant.prices.price_book import PriceBook
from accountant.wire.policy_models import Policy
from agent.commands.top_command import parse as live_prices
from fairshare.controller.policy_file import advice
from gputally.base import yaml_file
from gputally.base.yaml_file import Document, FileFault
from gputally.kubernetes.pod_queue_labels import ACCOUNTS
from gputally.server.config_loading import validate
from gputally.server.tokens_and_grants import Callers

SCHEMA = Path(__file__).parents[2] / "helm" / "gputally" / "values.schema.json"
ROW = {
    "id": "h100", "model": "H100", "price": "2.85", "per": "gpu-hour", "valid_from": "2026-01-01", "source": "contract",
    "as_of": "2026-01-01", "basis": "whole-instance",
}  # fmt: skip
QUEUES = [
    {"name": name, "deserved": 1, "refs": [f"{ACCOUNTS}:{name}"], "team": name}
    for name in ("research", "vision", "language", "serving", "teaching")
]
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "policy": {"queues": QUEUES},
    "prices": {"schema": 1, "currency": "EUR", "rows": [ROW]},
    "settings": {"auth": "off"},
    "callers": {"schema": 1},
    "deliveries": {"schema": 1},
    "inventory": {"schema": 1},
    "instances": {"schema": 1},
}


def _of(model: type[BaseModel]) -> Callable[[Document], object]:
    return lambda document: validate(document, model)


def _policy(document: Document) -> object:
    """Check a policy; a warning counts as an error."""
    policy = validate(document, Policy)
    if found := advice(policy):
        raise FileFault([each.message for each in found])
    return policy


def _values(document: Document) -> object:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    for fault in jsonschema_rs.validator_for(schema).iter_errors(_coalesced(document.data)):
        raise FileFault([f"{'.'.join(map(str, fault.instance_path))}: {fault.message}"])
    return document.data


def _coalesced(values: Any) -> Any:
    """Remove keys that are null, as Helm does before it checks the schema."""
    if not isinstance(values, dict):
        return values
    return {key: _coalesced(value) for key, value in values.items() if value is not None}


def _foreign(document: Document) -> object:
    """Check an object of Kubernetes, or a part of one, by its form only."""
    if not {"apiVersion", "kind", "spec", "metadata", "data"} & set(document.data):
        raise FileFault([f"{document.name}: no object of Kubernetes"])
    return document.data


def _theirs(document: Document) -> object:
    """Check a file of another program by its form only."""
    return document.data


KINDS: Mapping[str, Callable[[Document], object]] = {
    "rates": _of(Rates),
    "policy": _policy,
    "prices": _of(PriceBook),
    "settings": _of(Settings),
    "callers": _of(Callers),
    "deliveries": _of(DeliveriesFile),
    "inventory": _of(InventoryFile),
    "instances": _of(InstanceMap),
    "values": _values,
    "live-prices": live_prices,
    "kubernetes": _foreign,
    "theirs": _theirs,
}


def check(kind: str, text: str, name: str) -> object:
    """Check a block. Raises FileFault with one line for each fault."""
    shown = yaml_file.parse(text, name)
    missing = {key: value for key, value in WHOLE.get(kind, {}).items() if key not in shown.data}
    if missing:
        shown = yaml_file.parse(text.rstrip("\n") + "\n" + yaml.safe_dump(missing), name)
    return KINDS[kind](shown)
