"""What a cluster admin expects of any chart: names, labels, pods' usual fields, images, ways in, and nodes."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.chart.conftest import COMPONENT, OF_A_POD, SPREAD, VARIATIONS, Manifest, container, named, notes, pod, pods

ADMIN = VARIATIONS["as a cluster admin wants it"]
PRIVILEGED = {"agent"}
GPU_LABELS = {
    "nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present", "cloud.google.com/gke-gpu-driver-version",
    "karpenter.k8s.aws/instance-gpu-manufacturer", "k8s.amazonaws.com/accelerator", "kubernetes.azure.com/accelerator",
}  # fmt: skip


def agent(render: Any, **values: Any) -> Manifest:
    found: Manifest = named(render({"agent": values}))["DaemonSet", "gputally-agent"]["spec"]["template"]
    return found


def test_a_pods_usual_fields_reach_every_pod_and_every_container(render: Any) -> None:
    found = dict(pods(render(ADMIN)))
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


def test_a_field_of_a_security_context_is_replaced_or_left_out(render: Any) -> None:
    own = {"podSecurityContext": {"runAsUser": 1000660000, "fsGroup": None}, "securityContext": {"runAsNonRoot": None}}
    accountant = pod(named(render({"accountant": own}))["StatefulSet", "gputally-accountant"])
    assert accountant["securityContext"]["runAsUser"] == 1000660000
    assert "fsGroup" not in accountant["securityContext"]
    assert "runAsNonRoot" not in accountant["containers"][0]["securityContext"]
    assert accountant["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_pods_label_cannot_take_it_out_of_its_selector(render: Any) -> None:
    template = agent(render, podLabels={COMPONENT: "other", "app.kubernetes.io/version": "mine"})
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
        in container(named(manifests)["DaemonSet", "gpus-agent"])["args"]
    )


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ({}, "ghcr.io/gputally/agent:0.1.0"),
        ({"image": {"registry": "images.example:5000/gpu/"}}, "images.example:5000/gpu/gputally/agent:0.1.0"),
        (
            {"global": {"imageRegistry": "mirror.example"}, "image": {"registry": "x"}},
            "mirror.example/gputally/agent:0.1.0",
        ),
        (
            {
                "image": {"registry": ""},
                "agent": {"image": {"repository": "localhost/agent", "tag": "dev"}},
                "accountant": {"image": {"repository": "r.example/accountant"}},
                "fairshare": {"image": {"repository": "r.example/fairshare"}},
            },
            "localhost/agent:dev",
        ),
    ],
)  # fmt: skip
def test_an_image_is_of_the_registry_that_is_named(render: Any, values: dict[str, Any], image: str) -> None:
    assert container(named(render(values))["DaemonSet", "gputally-agent"])["image"] == image


def test_pull_secrets_of_a_parent_chart_come_before_ours(render: Any) -> None:
    values = {"global": {"imagePullSecrets": ["a", {"name": "b"}]}, "imagePullSecrets": [{"name": "c"}]}
    for component, template in pods(render(values)):
        assert template["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}, {"name": "c"}], component


def test_agents_start_on_nodes_of_any_usual_label_and_need_no_runtime_class(render: Any) -> None:
    spec = agent(render)["spec"]
    assert "runtimeClassName" not in spec, "there is no cluster to ask for one"
    assert "nodeSelector" not in spec
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert {e["key"] for term in required["nodeSelectorTerms"] for e in term["matchExpressions"]} == GPU_LABELS
    assert all(len(term["matchExpressions"]) == 1 for term in required["nodeSelectorTerms"]), "any of them will do"


@pytest.mark.parametrize("own", [{"nodeSelector": {"pool": "gpu"}}, {"affinity": {"podAntiAffinity": {}}}])
def test_nodes_that_the_values_select_need_no_other_label(render: Any, own: dict[str, Any]) -> None:
    spec = agent(render, **own)["spec"]
    assert {key: spec.get(key) for key in ("nodeSelector", "affinity")} == {
        "nodeSelector": None,
        "affinity": None,
        **own,
    }


def test_a_runtime_class_that_is_named_is_used(render: Any) -> None:
    assert agent(render, runtimeClassName="nvidia-cdi")["spec"]["runtimeClassName"] == "nvidia-cdi"
    assert "runtimeClassName" not in agent(render, runtimeClassName="")["spec"]


def test_pages_are_reached_through_an_ingress_and_a_gateway(render: Any) -> None:
    found = named(render(ADMIN))
    ingress = found["Ingress", "gputally-accountant"]["spec"]
    assert ingress["ingressClassName"] == "nginx"
    assert [rule["host"] for rule in ingress["rules"]] == ["gpus.example"], "the host of publicUrl"
    assert ingress["tls"] == ADMIN["accountant"]["ingress"]["tls"]
    (path,) = ingress["rules"][0]["http"]["paths"]
    service = found["Service", "gputally-accountant"]["spec"]["ports"][0]
    assert path["backend"]["service"] == {"name": "gputally-accountant", "port": {"number": service["port"]}}
    assert service["appProtocol"] == "https"
    route = found["HTTPRoute", "gputally-accountant"]["spec"]
    assert (route["parentRefs"], route["hostnames"]) == ([{"name": "web", "namespace": "gateways"}], ["gpus.example"])
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend == {"name": "gputally-accountant", "port": service["port"]}
    validation = found["BackendTLSPolicy", "gputally-accountant"]["spec"]["validation"]
    assert validation["hostname"] == "gputally-accountant.metering.svc"
    (authority,) = validation["caCertificateRefs"]
    assert "ca.crt" in found["ConfigMap", authority["name"]]["data"]
    (rule,) = found["Ingress", "gputally-pages"]["spec"]["rules"]
    (pages,) = found["Service", "gputally-pages"]["spec"]["ports"]
    assert rule["host"] == "fairshare.example"
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": "gputally-pages",
        "port": {"number": pages["port"]},
    }


def test_prometheus_may_scrape_from_the_namespaces_that_are_selected(render: Any) -> None:
    def scrapers(values: dict[str, Any]) -> list[Any]:
        found = named(render({**values, "fairshare": {"prometheus": {"url": "http://prometheus.any.svc:9090"}}}))
        (metrics,) = (
            rule["from"] for rule in found["NetworkPolicy", "gputally-agent"]["spec"]["ingress"]
            if rule["ports"] == [{"port": "metrics"}]
        )  # fmt: skip
        (asked,) = (
            rule["to"] for rule in found["NetworkPolicy", "gputally-fairshare"]["spec"]["egress"]
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


def test_the_ledgers_volume_has_the_access_mode_that_is_asked_for(render: Any) -> None:
    def modes(values: dict[str, Any]) -> Any:
        found = named(render({"accountant": {"persistence": values}}))["StatefulSet", "gputally-accountant"]
        return found["spec"]["volumeClaimTemplates"][0]["spec"]["accessModes"]

    assert modes({}) == ["ReadWriteOncePod"]
    assert modes({"accessMode": "ReadWriteOnce"}) == ["ReadWriteOnce"]
