"""Conventions of charts: names, labels, usual pod fields, images, ingress, and nodes."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.chart.conftest import COMPONENT, OF_A_POD, SPREAD, VARIATIONS, Values, at, notes

ADMIN = VARIATIONS["as a cluster admin wants it"]
GPU_LABELS = {
    "nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present", "cloud.google.com/gke-gpu-driver-version",
    "karpenter.k8s.aws/instance-gpu-manufacturer", "k8s.amazonaws.com/accelerator", "kubernetes.azure.com/accelerator",
}  # fmt: skip


def test_a_pods_usual_fields_reach_every_pod_and_every_container(render: Any) -> None:
    found = dict(render(ADMIN).pods())
    assert set(found) == {"agent", "accountant", "fairshare", "backup", "report"}
    for component, template in found.items():
        labels, spec = template["metadata"]["labels"], template["spec"]
        assert labels["example.org/cost"] == "platform", component
        assert labels[COMPONENT] == component
        assert spec["dnsConfig"] == OF_A_POD["dnsConfig"]
        assert spec["priorityClassName"] == "high"
        assert spec["securityContext"]["supplementalGroups"] == [4000]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, "the chart's own stay"
        assert OF_A_POD["extraVolumes"][0] in spec["volumes"]
        for one in spec["containers"]:
            assert one["args"][-1] == "--log-level=debug"
            assert OF_A_POD["extraEnv"][0] in one["env"]
            assert OF_A_POD["extraVolumeMounts"][0] in one["volumeMounts"]
            assert one["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for component in ("accountant", "fairshare"):
        assert found[component]["spec"]["topologySpreadConstraints"] == SPREAD["topologySpreadConstraints"]
    assert found["agent"]["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    for component in ("backup", "report"):
        assert found[component]["metadata"]["annotations"] == {"note": "job"}


AGENT, ACCOUNTANT, FAIRSHARE = ("DaemonSet", "agent"), ("StatefulSet", "accountant"), ("Deployment", "fairshare")
IMAGE, POD = "spec.template.spec.containers.0.image", "spec.template.spec"
CLAIM = "spec.volumeClaimTemplates.0.spec.accessModes"
OWN_CONTEXT = {
    "podSecurityContext": {"runAsUser": 1000660000, "fsGroup": None}, "securityContext": {"runAsNonRoot": None},
}  # fmt: skip
OWN_IMAGES = {
    "image": {"registry": ""}, "agent": {"image": {"repository": "localhost/agent", "tag": "dev"}},
    "accountant": {"image": {"repository": "r.example/accountant"}},
    "fairshare": {"image": {"repository": "r.example/fairshare"}},
}  # fmt: skip
REACHED: list[tuple[str, Values, tuple[str, str], str, Any]] = [
    ("the usual image", {}, AGENT, IMAGE, "ghcr.io/gputally/agent:0.1.0"),
    ("a registry", {"image": {"registry": "images.example:5000/gpu/"}}, AGENT, IMAGE,
     "images.example:5000/gpu/gputally/agent:0.1.0"),
    ("a parent's registry", {"global": {"imageRegistry": "mirror.example"}, "image": {"registry": "x"}}, AGENT, IMAGE,
     "mirror.example/gputally/agent:0.1.0"),
    ("own images", OWN_IMAGES, AGENT, IMAGE, "localhost/agent:dev"),
    ("a field is replaced", {"accountant": OWN_CONTEXT}, ACCOUNTANT, f"{POD}.securityContext.runAsUser", 1000660000),
    ("a field is left out", {"accountant": OWN_CONTEXT}, ACCOUNTANT, f"{POD}.securityContext.fsGroup", None),
    ("a container's field is left out", {"accountant": OWN_CONTEXT}, ACCOUNTANT,
     f"{POD}.containers.0.securityContext.runAsNonRoot", None),
    ("the other fields stay", {"accountant": OWN_CONTEXT}, ACCOUNTANT,
     f"{POD}.containers.0.securityContext.readOnlyRootFilesystem", True),
    ("an own node selector", {"agent": {"nodeSelector": {"pool": "gpu"}}}, AGENT, f"{POD}.nodeSelector",
     {"pool": "gpu"}),
    ("which needs no other label", {"agent": {"nodeSelector": {"pool": "gpu"}}}, AGENT, f"{POD}.affinity", None),
    ("an own affinity", {"agent": {"affinity": {"podAntiAffinity": {}}}}, AGENT, f"{POD}.affinity",
     {"podAntiAffinity": {}}),
    ("which needs no selector", {"agent": {"affinity": {"podAntiAffinity": {}}}}, AGENT, f"{POD}.nodeSelector", None),
    ("a runtime class", {"agent": {"runtimeClassName": "nvidia-cdi"}}, AGENT, f"{POD}.runtimeClassName", "nvidia-cdi"),
    ("no runtime class", {"agent": {"runtimeClassName": ""}}, AGENT, f"{POD}.runtimeClassName", None),
    ("the usual access mode", {}, ACCOUNTANT, CLAIM, ["ReadWriteOncePod"]),
    ("an access mode", {"accountant": {"persistence": {"accessMode": "ReadWriteOnce"}}}, ACCOUNTANT, CLAIM,
     ["ReadWriteOnce"]),
    ("two controllers", {}, FAIRSHARE, "spec.replicas", 2),
    ("no rule for the nodes of one", {"fairshare": {"replicas": 1}}, FAIRSHARE, f"{POD}.affinity", None),
    ("one controller stays", {}, ("PodDisruptionBudget", "fairshare"), "spec.maxUnavailable", 1),
    ("one accountant stays", {}, ("PodDisruptionBudget", "accountant"), "spec.maxUnavailable", 1),
]  # fmt: skip


@pytest.mark.parametrize(("values", "place", "path", "expected"), [case[1:] for case in REACHED],
                         ids=[case[0] for case in REACHED])  # fmt: skip
def test_a_value_reaches_its_object(
    render: Any, values: Values, place: tuple[str, str], path: str, expected: Any
) -> None:
    assert at(render(values).find(*place), path) == expected


def test_a_pods_label_cannot_take_it_out_of_its_selector(render: Any) -> None:
    labels = {COMPONENT: "other", "app.kubernetes.io/version": "mine"}
    template = render({"agent": {"podLabels": labels}}).agent["spec"]["template"]
    assert template["metadata"]["labels"][COMPONENT] == "agent"


def test_names_are_what_the_overrides_say(render: Any) -> None:
    manifests = render({"nameOverride": "meter", "fullnameOverride": "gpus", "namespaceOverride": "finops"})
    for manifest in manifests:
        meta = manifest["metadata"]
        assert meta["labels"]["app.kubernetes.io/name"] == "meter"
        assert meta["name"].startswith(("gpus-", "finops-gpus-"))
        assert meta.get("namespace", "finops") == "finops"
    assert "metering" not in str(manifests), "the release's namespace"
    assert (
        "--url=https://gpus-accountant.finops.svc:8080"
        in manifests.by_name["DaemonSet", "gpus-agent"].container["args"]
    )


def test_pull_secrets_of_a_parent_chart_come_before_ours(render: Any) -> None:
    values = {"global": {"imagePullSecrets": ["a", {"name": "b"}]}, "imagePullSecrets": [{"name": "c"}]}
    for component, template in render(values).pods():
        assert template["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}, {"name": "c"}], component


def test_agents_start_on_nodes_of_any_usual_label_and_need_no_runtime_class(render: Any) -> None:
    spec = render({}).agent.pod
    assert "runtimeClassName" not in spec, "there is no cluster to ask for one"
    assert "nodeSelector" not in spec
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert {e["key"] for term in required["nodeSelectorTerms"] for e in term["matchExpressions"]} == GPU_LABELS
    assert all(len(term["matchExpressions"]) == 1 for term in required["nodeSelectorTerms"]), "any of them will do"


def test_pages_are_reached_through_an_ingress_and_a_gateway(render: Any) -> None:
    found = render(ADMIN)
    ingress = found.find("Ingress", "accountant")["spec"]
    assert ingress["ingressClassName"] == "nginx"
    assert [rule["host"] for rule in ingress["rules"]] == ["gpus.example"], "the host of publicUrl"
    assert ingress["tls"] == ADMIN["accountant"]["ingress"]["tls"]
    (path,) = ingress["rules"][0]["http"]["paths"]
    service = found.find("Service", "accountant")["spec"]["ports"][0]
    assert path["backend"]["service"] == {"name": "gputally-accountant", "port": {"number": service["port"]}}
    assert service["appProtocol"] == "https"
    route = found.find("HTTPRoute", "accountant")["spec"]
    assert (route["parentRefs"], route["hostnames"]) == ([{"name": "web", "namespace": "gateways"}], ["gpus.example"])
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend == {"name": "gputally-accountant", "port": service["port"]}
    validation = found.find("BackendTLSPolicy", "accountant")["spec"]["validation"]
    assert validation["hostname"] == "gputally-accountant.metering.svc"
    (authority,) = validation["caCertificateRefs"]
    assert "ca.crt" in found.by_name["ConfigMap", authority["name"]]["data"]
    (rule,) = found.find("Ingress", "pages")["spec"]["rules"]
    (pages,) = found.find("Service", "pages")["spec"]["ports"]
    assert rule["host"] == "fairshare.example"
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": "gputally-pages",
        "port": {"number": pages["port"]},
    }


def test_prometheus_may_scrape_from_the_namespaces_that_are_selected(render: Any) -> None:
    def scrapers(values: dict[str, Any]) -> list[Any]:
        found = render({**values, "fairshare": {"prometheus": {"url": "http://prometheus.any.svc:9090"}}})
        (metrics,) = (
            rule["from"] for rule in found.find("NetworkPolicy", "agent")["spec"]["ingress"]
            if rule["ports"] == [{"port": "metrics"}]
        )  # fmt: skip
        (asked,) = (
            rule["to"] for rule in found.find("NetworkPolicy", "fairshare")["spec"]["egress"]
            if rule["ports"] == [{"port": 9090}]
        )  # fmt: skip
        assert asked == metrics
        return list(metrics)

    usual = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["monitoring"]}
    assert scrapers({}) == [{"namespaceSelector": {"matchExpressions": [usual]}}]
    selector = {"matchLabels": {"prometheus": "yes"}}
    assert scrapers({"monitoring": {"namespaceSelector": selector}}) == [{"namespaceSelector": selector}]


def test_the_notes_say_who_cannot_reach_the_pages(chart: helm_python.Chart) -> None:
    ingress = {"accountant": {"ingress": {"enabled": True, "hosts": ["a.example"]}}}
    assert "WARNING: networkPolicy.accountantFrom names no namespace" in notes(chart, ingress)
    assert "WARNING" not in notes(chart, {**ingress, "networkPolicy": {"enabled": False}})
    assert "WARNING: fairshare.pages.from names no namespace" in notes(chart, ADMIN)
    assert "networkPolicy.accountantFrom names" not in notes(chart, ADMIN)
