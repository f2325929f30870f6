"""Helm with a cluster: what the chart's lookups find, as a chart of its own and as a dependency."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.conftest import CHART, Manifest, Rendered, chart_of_charts
from tests.chart.real.conftest import Recorder
from tests.deadlines import until
from tests.real.controlplane import PLAIN_TOKEN
from tests.real.programs import built

pytestmark = pytest.mark.real
SPACE, GROUP = "lookups", "monitoring.coreos.com"
GATEWAYS, CERTIFICATES = "gateway.networking.k8s.io", "cert-manager.io"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart with this chart as a dependency."""
    return chart_of_charts(tmp_path_factory.mktemp("parent") / "platform")


def planned(recorder: Recorder, chart: Path) -> Rendered:
    """Return the manifests of `helm install --dry-run=server` with a chart's defaults."""
    manifests = yaml.safe_load_all(installed(recorder, chart)["manifest"])
    return Rendered(Manifest(manifest) for manifest in manifests if manifest)


def installed(recorder: Recorder, chart: Path, *more: str, kubeconfig: Path | None = None) -> dict[str, Any]:
    """Return the release that would be installed. more: further arguments. kubeconfig: of a user other than the
    administrator."""
    program = str(built("clients.sh") / "helm")
    words = ("install", "gputally", str(chart), "--dry-run=server", "--namespace", SPACE, "--output", "json")
    who = ("--kubeconfig", str(kubeconfig or recorder.server.kubeconfig))
    done = subprocess.run([program, *words, *more, *who], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module", autouse=True)
def space(recorder: Recorder) -> None:
    recorder.make_namespace(SPACE)


@contextlib.contextmanager
def without_runtime_class(recorder: Recorder) -> Iterator[None]:
    recorder.send("DELETE", f"{CLASSES}/nvidia")
    try:
        yield
    finally:
        recorder.send("POST", CLASSES, {"metadata": {"name": "nvidia"}, "handler": "nvidia"})


def test_what_is_there_is_found_and_what_is_not_keeps_no_pod_from_starting(recorder: Recorder, parent: Path) -> None:
    def agents() -> dict[str, Any]:
        plans = [planned(recorder, chart).agent for chart in (CHART, parent)]
        alone, part = (plan.pod for plan in plans)
        assert alone == part
        return dict(alone)

    def scrapers() -> Any:
        (first, *_) = planned(recorder, CHART).find("NetworkPolicy", "agent")["spec"]["ingress"]
        return first["from"][0]["namespaceSelector"]["matchExpressions"][0]["values"]

    assert agents()["runtimeClassName"] == "nvidia"
    with without_runtime_class(recorder):
        assert "runtimeClassName" not in agents()
    assert scrapers() == ["monitoring"]
    recorder.server.define(GROUP, "v1", "prometheuses", "Prometheus")
    until(lambda: recorder.server.serves(f"/apis/{GROUP}/v1", "prometheuses"), lambda: "Prometheus is not served")
    recorder.apply(
        {"apiVersion": f"{GROUP}/v1", "kind": "Prometheus", "metadata": {"name": "k8s", "namespace": SPACE}},
        dry_run=False,
    )
    assert scrapers() == [SPACE]


def test_the_notes_warn_of_what_would_keep_pods_from_starting(recorder: Recorder) -> None:
    def notes() -> str:
        return str(installed(recorder, CHART)["info"]["notes"])

    assert "WARNING: the cluster has no default StorageClass" in notes()
    assert "no RuntimeClass `nvidia`" not in notes()
    standard = {"metadata": {"name": "standard"}, "provisioner": "csi.example"}
    standard["metadata"] |= {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    recorder.send("POST", "/apis/storage.k8s.io/v1/storageclasses", standard)
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    recorder.send("PATCH", f"/api/v1/namespaces/{SPACE}", level, "application/merge-patch+json")
    try:
        with without_runtime_class(recorder):
            told = notes()
    finally:
        recorder.send("DELETE", "/apis/storage.k8s.io/v1/storageclasses/standard")
    assert "default StorageClass" not in told
    assert f"WARNING: the namespace {SPACE} enforces the Pod Security level restricted" in told
    assert "There is no RuntimeClass `nvidia`" in told


def test_an_installer_who_may_read_nothing_of_the_cluster_installs_without_lookups(
    recorder: Recorder, tmp_path: Path
) -> None:
    group, metadata = "rbac.authorization.k8s.io", {"name": "installer", "namespace": SPACE}
    role = {"kind": "Role", "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
    binding = {
        "kind": "RoleBinding", "roleRef": {"apiGroup": group, "kind": "Role", "name": "installer"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "plain"}],
    }  # fmt: skip
    for manifest in (role, binding):
        recorder.apply({"apiVersion": f"{group}/v1", "metadata": metadata, **manifest}, dry_run=False)
    plain = recorder.server.kubeconfig_for(PLAIN_TOKEN, tmp_path)
    # Dry runs on the server read what is there, and the administrator makes the cluster-wide roles.
    roles = [f"{name}.rbac.create=false" for name in ("agent", "accountant", "fairshare")]
    values = ("--set", ",".join([*roles, "networkPolicy.enabled=false"]))
    with pytest.raises(AssertionError, match=r"cannot get resource \"(namespaces|runtimeclasses)\""):
        installed(recorder, CHART, *values, kubeconfig=plain)
    found = installed(recorder, CHART, *values, "--set", "lookups=false", kubeconfig=plain)
    assert "runtimeClassName" not in found["manifest"]


def test_a_class_that_is_not_there_is_said_before_anything_is_installed(recorder: Recorder) -> None:
    """The presets name classes. A volume that was made by hand needs no object of its class."""
    classes = "/apis/storage.k8s.io/v1/storageclasses"

    def refused(*sets: str) -> str:
        try:
            installed(recorder, CHART, *(word for each in sets for word in ("--set", each)))
        except AssertionError as error:
            return str(error)
        return ""

    storage = "accountant.persistence.storageClassName=local-path"
    assert 'no StorageClass "local-path"' in refused(storage)
    assert refused(storage, "lookups=false") == ""
    recorder.send("POST", classes, {"metadata": {"name": "local-path"}, "provisioner": "csi.example"})
    assert refused(storage) == ""
    recorder.send("DELETE", f"{classes}/local-path")
    spec = {
        "storageClassName": "local-path", "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": "/data"},
    }  # fmt: skip
    recorder.send("POST", "/api/v1/persistentvolumes", {"metadata": {"name": "by-hand"}, "spec": spec})
    assert refused(storage) == ""
    recorder.send("DELETE", "/api/v1/persistentvolumes/by-hand")
    runtime = "agent.runtimeClassName=nvidia"
    assert refused(runtime) == ""
    with without_runtime_class(recorder):
        assert 'no RuntimeClass "nvidia"' in refused(runtime)
    for component in ("accountant", "agent", "fairshare"):
        assert 'no PriorityClass "gold"' in refused(f"{component}.priorityClassName=gold")
    recorder.send("POST", PRIORITIES, {"metadata": {"name": "gold"}, "value": 10})
    assert refused("agent.priorityClassName=gold") == ""
    recorder.send("DELETE", f"{PRIORITIES}/gold")


def some(api_version: str, kind: str, name: str, namespace: str = "", **more: Any) -> dict[str, Any]:
    place = {"namespace": namespace} if namespace else {}
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, **place}, **more}


ROUTE = "accountant.httpRoute"
ISSUER = "accountant.tls.certManager.issuerRef"
INGRESSES = "networking.k8s.io/v1"


@pytest.mark.parametrize(
    ("values", "told", "missing"),
    [
        (
            (
                "accountant.publicUrl=https://gpus.example,accountant.ingress.enabled=true,"
                "accountant.ingress.className=nginx"
            ),
            'accountant.ingress.className: the cluster has no IngressClass "nginx"',
            some(INGRESSES, "IngressClass", "nginx", spec={"controller": "example.com/nginx"}),
        ),
        (
            (
                "fairshare.pages.enabled=true,fairshare.pages.tokens.existingSecret=tokens,"
                "fairshare.pages.ingress.enabled=true,fairshare.pages.ingress.hosts={shares.example},"
                "fairshare.pages.ingress.className=traefik"
            ),
            'fairshare.pages.ingress.className: the cluster has no IngressClass "traefik"',
            some(INGRESSES, "IngressClass", "traefik", spec={"controller": "example.com/traefik"}),
        ),
        (
            (
                f"accountant.publicUrl=https://gpus.example,{ROUTE}.enabled=true,{ROUTE}.parentRefs[0].name=web,"
                f"{ROUTE}.parentRefs[0].namespace={SPACE}"
            ),
            f'{ROUTE}.parentRefs: the namespace {SPACE} has no Gateway "web"',
            some(f"{GATEWAYS}/v1", "Gateway", "web", SPACE),
        ),
        (
            f"{ISSUER}.name=company",
            f'{ISSUER}.name: the cluster has no ClusterIssuer "company"',
            some(f"{CERTIFICATES}/v1", "ClusterIssuer", "company"),
        ),
        (
            f"{ISSUER}.name=company,{ISSUER}.kind=Issuer",
            f'{ISSUER}.name: the namespace {SPACE} has no Issuer "company"',
            some(f"{CERTIFICATES}/v1", "Issuer", "company", SPACE),
        ),
        (
            "agent.namespace.name=lookups-agents",
            'agent.namespace.name: the cluster has no Namespace "lookups-agents"',
            some("v1", "Namespace", "lookups-agents"),
        ),
        (
            "namespaceOverride=lookups-release",
            'namespaceOverride: the cluster has no Namespace "lookups-release"',
            some("v1", "Namespace", "lookups-release"),
        ),
    ],
    ids=["ingress", "ingress of the controller", "gateway", "cluster issuer", "issuer", "agents", "release"],
)
@pytest.mark.usefixtures("of_others")
def test_what_others_provide_and_a_value_names_is_said_before_anything_is_installed(
    recorder: Recorder, values: str, told: str, missing: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError) as refused:
        installed(recorder, CHART, "--set", values)
    assert told in str(refused.value)
    installed(recorder, CHART, "--set", values, "--set", "lookups=false")
    recorder.apply(missing, dry_run=False)
    installed(recorder, CHART, "--set", values)
    recorder.send("DELETE", f"{recorder.place(missing)}/{missing['metadata']['name']}")


@pytest.fixture(scope="module")
def of_others(recorder: Recorder) -> Iterator[None]:
    """The kinds of cert-manager and of the Gateway API that the server lacks, as long as this module runs."""
    kinds = [
        (CERTIFICATES, "certificates", "Certificate", True), (CERTIFICATES, "issuers", "Issuer", True),
        (CERTIFICATES, "clusterissuers", "ClusterIssuer", False), (GATEWAYS, "gateways", "Gateway", True),
        (GATEWAYS, "httproutes", "HTTPRoute", True), (GATEWAYS, "backendtlspolicies", "BackendTLSPolicy", True),
    ]  # fmt: skip
    made = [kind for kind in kinds if not recorder.server.serves(f"/apis/{kind[0]}/v1", kind[1])]
    try:
        for group, plural, kind, namespaced in made:
            recorder.server.define(group, "v1", plural, kind, namespaced=namespaced)
        for group, plural, *_ in made:
            until(lambda g=group, p=plural: recorder.server.serves(f"/apis/{g}/v1", p), lambda p=plural: f"no {p}")
        yield
    finally:
        for group, plural, *_ in made:
            definition = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.{group}"
            recorder.send("DELETE", definition)
            until(lambda at=definition: recorder.refused("GET", at, None), lambda p=plural: f"{p} remains")


@pytest.mark.parametrize("preset", sorted(CHART.glob("presets/*.yaml")), ids=lambda preset: preset.stem)
def test_a_preset_says_which_class_the_cluster_lacks(recorder: Recorder, preset: Path) -> None:
    values = yaml.safe_load(preset.read_text())
    runtime = values.get("agent", {}).get("runtimeClassName", "")
    storage = values.get("accountant", {}).get("persistence", {}).get("storageClassName", "")
    with without_runtime_class(recorder):
        try:
            installed(recorder, CHART, "--values", str(preset))
            told = ""
        except AssertionError as error:
            told = str(error)
    named = [f'{kind} "{name}"' for kind, name in (("RuntimeClass", runtime), ("StorageClass", storage)) if name]
    if named:
        assert any(f"the cluster has no {one}" in told for one in named), told
    else:  # another release of these tests has the preset's namespaces
        assert "the cluster has no" not in told
