"""Every example, as a real API server sees it: strict server-side dry-run, and the Pod Security Standards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.conftest import COMPONENT
from tests.chart.real.conftest import AGENTS, CRDS, RELEASE, Recorder, served
from tests.patience import until

pytestmark = pytest.mark.real
Manifest = dict[str, Any]
PRIVILEGED = {"agent"}


@pytest.fixture(scope="session")
def openshift(recorder: Recorder) -> None:
    """Its SecurityContextConstraints by the fields that OpenShift documents, and no others."""
    switch, words = {"type": "boolean"}, {"type": "array", "items": {"type": "string"}}
    strategy = {"type": "object", "properties": {"type": {"type": "string"}}}
    names = ("HostDirVolumePlugin", "HostIPC", "HostNetwork", "HostPID", "HostPorts", "PrivilegedContainer")
    properties = {f"allow{name}": switch for name in names}
    properties |= {"allowPrivilegeEscalation": switch, "readOnlyRootFilesystem": switch}
    lists = ("allowedCapabilities", "defaultAddCapabilities", "requiredDropCapabilities", "seccompProfiles", "volumes")
    properties |= dict.fromkeys((*lists, "users", "groups"), words)
    properties |= dict.fromkeys(("runAsUser", "seLinuxContext", "fsGroup", "supplementalGroups"), strategy)
    group, plural = "security.openshift.io", "securitycontextconstraints"
    schema = {"openAPIV3Schema": {"type": "object", "properties": properties}}
    recorder.send(
        "POST",
        CRDS,
        {
            "metadata": {"name": f"{plural}.{group}"},
            "spec": {
                "group": group,
                "scope": "Cluster",
                "names": {"plural": plural, "kind": "SecurityContextConstraints", "singular": plural},
                "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
            },
        },
    )
    until(lambda: served(recorder, f"/apis/{group}/v1", plural), lambda: "OpenShift's kind is not served")


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Component and pod of every workload, as its controller would make it."""
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


@pytest.mark.usefixtures("openshift")
def test_every_object_of_an_example_is_taken(recorder: Recorder, render: Any, example: dict[str, Any]) -> None:
    manifests = render(example)
    assert len(manifests) > 10
    for manifest in manifests:
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
