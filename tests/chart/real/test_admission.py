"""Every example on a real API server: strict server-side dry-run, and the Pod Security Standards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.conftest import COMPONENT, EVERY, VARIATIONS
from tests.chart.real.conftest import AGENTS, RELEASE, Recorder
from tests.deadlines import until

pytestmark = pytest.mark.real
Manifest = dict[str, Any]
PRIVILEGED = {"agent"}


def strict(
    recorder: Recorder, group: str, plural: str, kind: str, schema: Manifest, *, namespaced: bool = True
) -> None:
    """Define a kind with the fields that its project documents, and no others."""
    recorder.server.define(group, "v1", plural, kind, schema, namespaced=namespaced)
    until(lambda: recorder.server.serves(f"/apis/{group}/v1", plural), lambda: f"{kind} is not served")


TEXT, SWITCH, NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
WORDS = {"type": "array", "items": TEXT}


def fields(**properties: Any) -> Manifest:
    return {"type": "object", "properties": properties}


def several(**properties: Any) -> Manifest:
    return {"type": "array", "items": fields(**properties)}


@pytest.fixture(scope="session")
def foreign(recorder: Recorder) -> None:
    """The kinds of OpenShift, cert-manager and the Gateway API that the chart uses, with their documented fields."""
    names = ("HostDirVolumePlugin", "HostIPC", "HostNetwork", "HostPID", "HostPorts", "PrivilegedContainer")
    constraints = {f"allow{name}": SWITCH for name in names}
    constraints |= {"allowPrivilegeEscalation": SWITCH, "readOnlyRootFilesystem": SWITCH}
    lists = ("allowedCapabilities", "defaultAddCapabilities", "requiredDropCapabilities", "seccompProfiles", "volumes")
    constraints |= dict.fromkeys((*lists, "users", "groups"), WORDS)
    constraints |= dict.fromkeys(("runAsUser", "seLinuxContext", "fsGroup", "supplementalGroups"), fields(type=TEXT))
    group = "security.openshift.io"
    kind = "SecurityContextConstraints"
    strict(recorder, group, kind.lower(), kind, fields(**constraints), namespaced=False)
    key = fields(algorithm=TEXT, size=NUMBER, rotationPolicy=TEXT)
    issuer = fields(name=TEXT, kind=TEXT, group=TEXT)
    spec = fields(secretName=TEXT, dnsNames=WORDS, privateKey=key, issuerRef=issuer)
    strict(recorder, "cert-manager.io", "certificates", "Certificate", fields(spec=spec))
    reference = {"group": TEXT, "kind": TEXT, "name": TEXT, "namespace": TEXT, "sectionName": TEXT, "port": NUMBER}
    rules = several(backendRefs=several(**reference))
    route = fields(parentRefs=several(**reference), hostnames=WORDS, rules=rules)
    strict(recorder, "gateway.networking.k8s.io", "httproutes", "HTTPRoute", fields(spec=route))
    local = {"group": TEXT, "kind": TEXT, "name": TEXT}
    validation = fields(hostname=TEXT, caCertificateRefs=several(**local), wellKnownCACertificates=TEXT)
    policy = fields(targetRefs=several(**local), validation=validation)
    strict(recorder, "gateway.networking.k8s.io", "backendtlspolicies", "BackendTLSPolicy", fields(spec=policy))


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Return component and pod of every workload, as its controller would create it."""
    for manifest in copy.deepcopy(manifests):
        component = manifest["metadata"]["labels"][COMPONENT]
        spec = manifest.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if manifest["kind"] == "Pod":
            yield component, manifest
        elif "template" in spec:
            # The controller of a StatefulSet adds the claims as volumes.
            claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
            pod = spec["template"]
            volumes = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims]
            pod["spec"].setdefault("volumes", []).extend(volumes)
            pod["metadata"] |= {"name": component, "namespace": manifest["metadata"]["namespace"]}
            yield component, {"apiVersion": "v1", "kind": "Pod", **pod}


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_object_of_every_variation_example_and_preset_is_taken(
    recorder: Recorder, render: Any, name: str
) -> None:
    """Strict validation refuses fields that Kubernetes does not know."""
    spaces = {space["metadata"]["name"] for space in recorder.send("GET", "/api/v1/namespaces")["items"]}
    manifests = render(EVERY[name])
    assert name in VARIATIONS or len(manifests) > 10
    for manifest in manifests:
        space = manifest["metadata"].get("namespace")
        if space is not None and space not in spaces:  # which a dry run does not make
            manifest["metadata"]["namespace"] = AGENTS
        answer = recorder.apply(manifest, dry_run=True)
        assert answer["metadata"]["name"] == manifest["metadata"]["name"]


def test_everything_but_the_agents_passes_the_restricted_standard(
    recorder: Recorder, render: Any, example: dict[str, Any]
) -> None:
    found = dict(pods(render(example)))
    assert "accountant" in found
    for component, pod in found.items():
        for space in (RELEASE, AGENTS):
            if component in PRIVILEGED and space == RELEASE:
                continue
            pod["metadata"]["namespace"] = space
            path = f"/api/v1/namespaces/{space}/pods?dryRun=All&fieldValidation=Strict"
            assert recorder.refused("POST", path, pod) == "", (component, space)


def test_agents_are_refused_where_they_should_not_be(recorder: Recorder, render: Any) -> None:
    (agent,) = (pod for component, pod in pods(render({})) if component == "agent")
    reason = recorder.refused("POST", f"/api/v1/namespaces/{RELEASE}/pods?dryRun=All", agent)
    assert 'violates PodSecurity "restricted:latest"' in reason
    assert "hostPath" in reason
