"""Helm itself, with a cluster to ask: what the chart finds there by itself, alone and as a part of another chart."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.conftest import CHART, named
from tests.chart.real.conftest import Recorder, served, stand_in
from tests.patience import until
from tests.real.controlplane import PLAIN_TOKEN
from tests.real.programs import built

pytestmark = pytest.mark.real
SPACE, GROUP = "lookups", "monitoring.coreos.com"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart of charts."""
    folder = tmp_path_factory.mktemp("parent") / "platform"
    shutil.copytree(CHART, folder / "charts" / "gputally")
    dependency = {"name": "gputally", "version": "0.1.0", "repository": ""}
    description = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(description), "utf-8")
    return folder


def planned(recorder: Recorder, chart: Path) -> dict[tuple[str, str], Any]:
    """What `helm install --dry-run=server` would make of a chart's defaults."""
    return named([m for m in yaml.safe_load_all(installed(recorder, chart)["manifest"]) if m])


def installed(recorder: Recorder, chart: Path, *more: str, kubeconfig: Path | None = None) -> dict[str, Any]:
    """The release that it would be. more: further arguments. kubeconfig: of another person than the administrator."""
    program = str(built("clients.sh") / "helm")
    words = ("install", "gputally", str(chart), "--dry-run=server", "--namespace", SPACE, "--output", "json")
    who = ("--kubeconfig", str(kubeconfig or recorder.server.kubeconfig))
    done = subprocess.run([program, *words, *more, *who], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_is_there_is_found_and_what_is_not_keeps_no_pod_from_starting(recorder: Recorder, parent: Path) -> None:
    with contextlib.suppress(urllib.error.HTTPError):
        recorder.send("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})

    def agents() -> dict[str, Any]:
        plans = [planned(recorder, chart)["DaemonSet", "gputally-agent"] for chart in (CHART, parent)]
        alone, part = (plan["spec"]["template"]["spec"] for plan in plans)
        assert alone == part
        return dict(alone)

    def scrapers() -> Any:
        (first, *_) = planned(recorder, CHART)["NetworkPolicy", "gputally-agent"]["spec"]["ingress"]
        return first["from"][0]["namespaceSelector"]["matchExpressions"][0]["values"]

    assert agents()["runtimeClassName"] == "nvidia"
    recorder.send("DELETE", f"{CLASSES}/nvidia")
    try:
        assert "runtimeClassName" not in agents()
    finally:
        recorder.send("POST", CLASSES, {"metadata": {"name": "nvidia"}, "handler": "nvidia"})
    assert scrapers() == ["monitoring"]
    stand_in(recorder, GROUP, "v1", "prometheuses", "Prometheus")
    until(lambda: served(recorder, f"/apis/{GROUP}/v1", "prometheuses"), lambda: "Prometheus is not served")
    recorder.apply(
        {"apiVersion": f"{GROUP}/v1", "kind": "Prometheus", "metadata": {"name": "k8s", "namespace": SPACE}},
        dry_run=False,
    )
    assert scrapers() == [SPACE]


def test_the_notes_warn_of_what_would_keep_pods_from_starting(recorder: Recorder) -> None:
    def notes() -> str:
        return str(installed(recorder, CHART)["info"]["notes"])

    space = f"/api/v1/namespaces/{SPACE}"
    with contextlib.suppress(urllib.error.HTTPError):
        recorder.send("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    assert "WARNING: the cluster has no default StorageClass" in notes()
    assert "no RuntimeClass `nvidia`" not in notes()
    standard = {"metadata": {"name": "standard"}, "provisioner": "csi.example"}
    standard["metadata"] |= {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    recorder.send("POST", "/apis/storage.k8s.io/v1/storageclasses", standard)
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    recorder.send("PATCH", space, level, "application/merge-patch+json")
    recorder.send("DELETE", f"{CLASSES}/nvidia")
    try:
        told = notes()
    finally:
        recorder.send("POST", CLASSES, {"metadata": {"name": "nvidia"}, "handler": "nvidia"})
        recorder.send("DELETE", "/apis/storage.k8s.io/v1/storageclasses/standard")
    assert "default StorageClass" not in told
    assert f"WARNING: the namespace {SPACE} enforces the Pod Security level restricted" in told
    assert "There is no RuntimeClass `nvidia`" in told


def test_an_installer_who_may_read_nothing_of_the_cluster_installs_without_lookups(
    recorder: Recorder, tmp_path: Path
) -> None:
    with contextlib.suppress(urllib.error.HTTPError):
        recorder.send("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "installer", "namespace": SPACE},
        "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "installer", "namespace": SPACE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "installer"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "plain"}],
    }
    for manifest in (role, binding):
        recorder.apply(manifest, dry_run=False)
    plain = recorder.server.kubeconfig_for(PLAIN_TOKEN, tmp_path)
    # Dry runs on the server read what is there, and the administrator makes the cluster-wide roles.
    roles = [f"{name}.rbac.create=false" for name in ("agent", "accountant", "fairshare")]
    values = ("--set", ",".join([*roles, "networkPolicy.enabled=false"]))
    with pytest.raises(AssertionError, match=r"cannot get resource \"(namespaces|runtimeclasses)\""):
        installed(recorder, CHART, *values, kubeconfig=plain)
    found = installed(recorder, CHART, *values, "--set", "lookups=false", kubeconfig=plain)
    assert "runtimeClassName" not in found["manifest"]
