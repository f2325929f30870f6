"""`gputally install` on a real API server with only the rights of the chart's hook job, run twice."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gputally.server.tokens_and_grants import sha256
from tests.chart.real.conftest import RELEASE, Recorder

pytestmark = pytest.mark.real
HOLDERS = ("admin", "fairshare", "backup", "report")


def test_the_hooks_account_makes_the_secrets_and_changes_nothing_the_next_time(
    recorder: Recorder, render: Any, tmp_path: Path
) -> None:
    accountant = {"kubernetesApi": False, "tokens": {"create": True}}
    found = render({"accountant": accountant, "agent": {"enabled": False}})
    for kind in ("ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"):
        recorder.apply(found.find(kind, "tokens"), dry_run=False)
    job = found.find("Job", "tokens")
    recorder.apply(job, dry_run=True)
    kubeconfig = recorder.server.kubeconfig_for(recorder.server.token(RELEASE, "gputally-tokens"), tmp_path)

    def run() -> dict[str, str]:
        words = [sys.executable, "-m", "gputally", *job.container["args"], "--output=json"]
        environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environ)
        assert done.returncode == 0, done.stderr
        return {one["secret"].removeprefix("gputally-"): one["done"] for one in json.loads(done.stdout)}

    def secrets() -> dict[str, Any]:
        items = recorder.send("GET", f"/api/v1/namespaces/{RELEASE}/secrets")["items"]
        return {item["metadata"]["name"]: item for item in items if item["metadata"].get("labels")}

    names = {"accountant-tokens", *(f"{holder}-token" for holder in HOLDERS)}
    assert run() == dict.fromkeys(names, "made")
    made = secrets()
    listed = yaml.safe_load(base64.b64decode(made["gputally-accountant-tokens"]["data"]["tokens.yaml"]))["tokens"]
    hashes = {entry["name"]: entry["token_sha256"] for entry in listed}
    for holder in HOLDERS:
        token = base64.b64decode(made[f"gputally-{holder}-token"]["data"]["token"]).decode()
        assert hashes[f"gputally-{holder}"] == sha256(token)
    assert run() == dict.fromkeys(names, "kept")
    assert secrets() == made
    recorder.send("DELETE", f"/api/v1/namespaces/{RELEASE}/secrets/gputally-report-token")
    assert run() == dict.fromkeys(names, "kept") | {"accountant-tokens": "changed", "report-token": "made"}
    user = f"system:serviceaccount:{RELEASE}:gputally-tokens"
    codes = {entry["responseStatus"]["code"] for entry in recorder.entries(user)}
    assert 403 not in codes
    verbs = {entry["verb"] for entry in recorder.entries(user) if entry["objectRef"]["resource"] == "secrets"}
    assert verbs == {"get", "create", "patch"}, "every right of the role is used"
