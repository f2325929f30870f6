"""Makes the Secrets with bearer tokens that the chart mounts."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from accountant.cli.token_file import with_entry, without
from gputally.base.errors import AccountantError, ClusterError, NotFound
from gputally.base.yaml_file import FileFault, parse
from gputally.kubernetes.objects import Kind, Object
from gputally.server.config_loading import validate
from gputally.server.tokens_and_grants import Scope, TokenEntry, TokenList, new_token, sha256

SECRET = Kind("v1", "Secret", "secrets", namespaced=True, status=False)


MANAGER = "gputally-install"


TOKENS = "accountant-tokens"
"""Name of the Secret with the token file, without the chart's prefix."""


_LABELS = {"app.kubernetes.io/part-of": "gputally", "app.kubernetes.io/managed-by": MANAGER}


_PROGRAMS: Mapping[str, tuple[Scope, ...]] = {
    "fairshare": ("read", "policy"), "backup": ("admin",), "report": ("read",),
}  # fmt: skip
"""The chart's programs that call the accountant, with their scopes. Agents are bound to their node."""


class SecretsApi(Protocol):
    """The part of a client of the API server that the installation uses."""

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object: ...
    def create(self, obj: Object, *, field_manager: str, dry_run: bool = False) -> Object: ...
    def patch(
        self, kind: Kind, name: str, namespace: str, change: Object, *, field_manager: str, dry_run: bool = False
    ) -> Object: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The tokens to create.

    name: the prefix of all names in the chart (`fullnameOverride`, or the release's name).
    programs: whether the chart's programs get tokens.
    node, cluster: the node of the one agent that gets a token, and its cluster; None: no agent gets one."""

    name: str
    namespace: str
    programs: bool = False
    node: str | None = None
    cluster: str = "default"

    def holders(self) -> Mapping[str, tuple[Scope, ...]]:
        """The scopes of the token of each holder."""
        scopes_of: dict[str, tuple[Scope, ...]] = {"admin": ("read", "policy", "admin")}
        if self.programs:
            scopes_of |= _PROGRAMS
        if self.node:
            scopes_of["agent"] = ("ingest",)
        return scopes_of


def manifests(plan: Plan, existing: Mapping[str, Mapping[str, str]]) -> list[Object]:
    """The manifests of a plan's Secrets. existing: the content of existing Secrets, by name. Raises AccountantError if
    the existing token file is invalid."""
    file = existing.get(f"{plan.name}-{TOKENS}", {}).get("tokens.yaml", "tokens: []\n")
    secrets = []
    for holder, scopes in plan.holders().items():
        name, entry_name = f"{plan.name}-{holder}-token", f"{plan.name}-{holder}"
        token = existing.get(name, {}).get("token", "").strip()
        entries = {entry.name: entry.token_sha256 for entry in _entries(file, plan)}
        if not token or entries.get(entry_name) != sha256(token):
            node, cluster = (plan.node, plan.cluster) if holder == "agent" else (None, None)
            fresh, entry = new_token(entry_name, scopes, node=node, cluster=cluster, token=token or None)
            token = fresh
            try:
                if entry_name in entries:
                    file = without(file, entry_name)
                file = with_entry(file, entry)
            except ValueError as error:
                raise AccountantError(f"Secret {plan.namespace}/{plan.name}-{TOKENS}: tokens.yaml: {error}") from error
        secrets.append(_secret(plan, name, {"token": token}))
    return [_secret(plan, f"{plan.name}-{TOKENS}", {"tokens.yaml": file}), *secrets]


def install(plan: Plan, cluster: SecretsApi) -> dict[str, str]:
    """Creates the Secrets that are missing and updates the token file. Returns `made`, `changed` or `kept` for each
    Secret. Raises AccountantError."""
    existing = read(plan, cluster)
    results: dict[str, str] = {}
    for secret in manifests(plan, existing):
        name, content = secret["metadata"]["name"], secret["stringData"]
        data = {key: base64.b64encode(text.encode()).decode() for key, text in content.items()}
        try:
            if name not in existing:
                manifest = {key: value for key, value in secret.items() if key != "stringData"}
                cluster.create({**manifest, "data": data}, field_manager=MANAGER)
                results[name] = "made"
            elif any(existing[name].get(key) != text for key, text in content.items()):
                cluster.patch(SECRET, name, plan.namespace, {"data": data}, field_manager=MANAGER)
                results[name] = "changed"
            else:
                results[name] = "kept"
        except NotFound as error:
            make = f"kubectl create namespace {plan.namespace}"
            raise AccountantError(
                f"there is no namespace {plan.namespace}: run `{make}`, then this command again"
            ) from error
        except ClusterError as error:
            raise AccountantError(f"Secret {plan.namespace}/{name}: {error}") from error
    return results


def read(plan: Plan, cluster: SecretsApi) -> dict[str, dict[str, str]]:
    """The content of the plan's Secrets that exist, by name. Raises AccountantError."""
    contents = {}
    for name in (f"{plan.name}-{TOKENS}", *(f"{plan.name}-{holder}-token" for holder in plan.holders())):
        try:
            data = cluster.get(SECRET, name, plan.namespace).get("data") or {}
        except NotFound:
            continue
        except ClusterError as error:
            raise AccountantError(f"Secret {plan.namespace}/{name}: {error}") from error
        contents[name] = {key: base64.b64decode(value).decode(errors="replace") for key, value in data.items()}
    return contents


def _entries(text: str, plan: Plan) -> tuple[TokenEntry, ...]:
    """The entries of a token file. Raises AccountantError with the place of each fault."""
    where = f"Secret {plan.namespace}/{plan.name}-{TOKENS}: tokens.yaml"
    try:
        return validate(parse(text, where), TokenList).tokens
    except FileFault as error:
        raise AccountantError("\n".join(error.faults)) from error


def _secret(plan: Plan, name: str, content: Mapping[str, str]) -> Object:
    metadata = {"name": name, "namespace": plan.namespace, "labels": dict(_LABELS)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": dict(content)}
