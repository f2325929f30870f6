"""Callers who may sign in to the controller's pages in tests, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.provider import Provider

GRANTS = [
    {"groups": ["readers"], "scopes": ["read"]},
    {"groups": ["operators"], "scopes": ["read", "policy"]},
    {"groups": ["admins"], "scopes": ["admin"]},
    {"groups": ["leads"], "scopes": ["read"], "teams": ["vision"]},
    {"groups": ["bold-leads"], "scopes": ["read", "policy"], "teams": ["vision", "language"]},
]


def callers(folder: Path, login: Provider, **more: Any) -> Path:
    """The file of who signs in. more: of the issuer."""
    (folder / "keys.json").write_bytes(login.keys())
    (folder / "secret").write_text(f"{login.secret}\n")
    issuer = {
        "issuer": login.url, "audience": "gputally", "jwks_file": str(folder / "keys.json"), "user": "email",
        "login": {"client_id": "gputally", "client_secret_file": str(folder / "secret")}, **more,
    }  # fmt: skip
    file = folder / "callers.yaml"
    file.write_text(json.dumps({"schema": 1, "issuers": [issuer], "grants": GRANTS}))
    return file


def key(folder: Path) -> Path:
    file = folder / "session.key"
    file.write_bytes(b"k" * 32)
    return file
