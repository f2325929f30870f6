"""The rendered manifests are valid, labelled, and equal to the golden ones."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from dashboards import __main__, prometheus_rules
from tests.chart.conftest import FILES, Manifest, Rendered, Values, chart_of_charts, documents, notes, rendered_by

GOLDEN = Path(__file__).parent / "golden"
FOREIGN = {"SecurityContextConstraints", "Certificate", "HTTPRoute", "BackendTLSPolicy"}
"""Kinds of OpenShift, cert-manager and the Gateway API."""


def test_lint_finds_nothing(folder: Path, values: dict[str, Any]) -> None:
    report = helm_python.lint(folder, values, strict=True, namespace="metering")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 0] == []


def test_kubernetes_knows_every_field(manifests: Rendered) -> None:
    from kubernetes import client

    for manifest in manifests:
        if manifest["kind"] not in FOREIGN:
            getattr(client, f"V1{manifest['kind']}").model_validate(manifest)


def test_objects_are_named_once_and_fit_their_release(manifests: Rendered, values: dict[str, Any]) -> None:
    names = [(m["kind"], m["metadata"].get("namespace"), m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)
    for manifest in manifests:
        meta = manifest["metadata"]
        assert len(meta["name"]) <= 63
        if manifest["kind"] not in {"ClusterRole", "ClusterRoleBinding", "Namespace", "SecurityContextConstraints"}:
            assert meta["namespace"] in {"metering", "gpu-agents", "gputally-agents"}
        labels = meta["labels"]
        assert labels["app.kubernetes.io/instance"] == "gputally"
        assert labels["app.kubernetes.io/part-of"] == values.get("commonLabels", {}).get(
            "app.kubernetes.io/part-of", "gputally"
        )
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert re.fullmatch(r"gputally-\d+\.\d+\.\d+", labels["helm.sh/chart"])


def test_a_long_name_leaves_room_for_what_kubernetes_puts_behind_it(render: Any) -> None:
    """A StatefulSet's pods have its name and a hash of ten digits in one label; a CronJob adds eleven characters."""
    longest = {"StatefulSet": 63 - 11, "CronJob": 63 - 11}
    jobs = {"backup": {"enabled": True}, "report": {"enabled": True}}
    names = {m["kind"]: m["metadata"]["name"] for m in render({"fullnameOverride": "a" * 50, **jobs})}
    for kind, most in longest.items():
        assert len(names[kind]) <= most, kind


def test_selectors_hold_only_what_never_changes(workloads: dict[str, Manifest]) -> None:
    stable = {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
    for name, workload in workloads.items():
        selector = workload["spec"]["selector"]["matchLabels"]
        assert set(selector) == stable | ({"gputally.dev/pool"} if "/" in name else set())
        assert selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_what_is_mounted_exists_and_what_exists_is_mounted(workloads: dict[str, Manifest]) -> None:
    for workload in workloads.values():
        claims = {c["metadata"]["name"] for c in workload["spec"].get("volumeClaimTemplates", [])}
        assert set(workload.volumes) | claims == {m["name"] for m in workload.container["volumeMounts"]}


def test_pods_are_replaced_when_their_files_change(render: Any) -> None:
    def checksum(kind: str, values: dict[str, Any]) -> str:
        workload = next(m for m in render(values) if m["kind"] == kind)
        notes = workload["spec"]["template"]["metadata"]["annotations"]
        return str(next(value for key, value in notes.items() if key.startswith("checksum/")))

    other = {"fairshare": {"policy": {"text": "schema: 1\nqueues: [{name: a}]\n"}}}
    assert checksum("Deployment", {}) != checksum("Deployment", other)
    priced = {"accountant": {"prices": {"text": "schema: 1\n"}}}
    assert checksum("StatefulSet", {}) != checksum("StatefulSet", priced)


def test_a_file_reaches_its_config_map_unchanged(render: Any) -> None:
    text = "schema: 1\nrows:\n  - id: 'a'   # with a comment: and a colon\n    price: \"2.50\"\n"
    found = render({"accountant": {"prices": {"text": text}}})
    assert found.find("ConfigMap", "accountant-prices")["data"]["prices.yaml"] == text


def test_an_existing_config_map_is_used_and_not_made(render: Any) -> None:
    manifests = render({"fairshare": {"policy": {"existingConfigMap": "ours"}}})
    assert "gputally-fairshare-policy" not in {m["metadata"]["name"] for m in manifests}
    deployment = next(m for m in manifests if m["kind"] == "Deployment")
    assert deployment.volumes["policy"]["configMap"]["name"] == "ours"


def test_dashboards_carry_the_label_of_the_sidecar_each_in_a_map_of_its_own(render: Any) -> None:
    boards = [m for m in render({}) if m["metadata"]["name"].startswith("gputally-dashboard-")]
    assert {m["metadata"]["name"].removeprefix("gputally-dashboard-") for m in boards} == set(__main__.DASHBOARDS)
    for board in boards:
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert board["metadata"]["annotations"]["grafana_folder"] == "gputally"
        ((name, text),) = board["data"].items()
        assert json.loads(text)["uid"] == name.removesuffix(".json")
        assert len(text) < 512 * 1024  # half of what a ConfigMap may have
    assert [m for m in render({"dashboards": {"enabled": False}}) if "dashboard" in m["metadata"]["name"]] == []


@pytest.fixture(scope="module")
def with_operator(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Rendered]:
    """Render where the operator's kinds are installed; offline, Helm knows no CRDs."""
    copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("operator") / "gputally"))
    asked = '(.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")'
    for name in ("monitoring.yaml", "prometheusrule.yaml"):
        template = copy / "templates" / name
        assert asked in template.read_text("utf-8")
        template.write_text(template.read_text("utf-8").replace(asked, "(true)"), "utf-8")
    return partial(rendered_by, helm_python.Chart.load(copy))


def test_monitors_scrape_every_program_and_keep_our_labels(with_operator: Any) -> None:
    token = {"existingSecret": "prometheus-reads", "key": "token"}
    values = {"monitoring": {"enabled": True, "labels": {"release": "prometheus"}, "token": token}}
    everything = with_operator(values)
    monitors = {m["metadata"]["labels"]["app.kubernetes.io/component"]: m for m in everything if "Monitor" in m["kind"]}
    assert {component: m["kind"] for component, m in monitors.items()} == {
        "agent": "PodMonitor",
        "accountant": "ServiceMonitor",
        "fairshare": "ServiceMonitor",
    }
    ports = {p["name"] for m in everything.of("Service") for p in m["spec"]["ports"]} | {"metrics"}
    for component, monitor in monitors.items():
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["honorLabels"] is True
        credentials = {"credentials": {"name": "prometheus-reads", "key": "token"}}
        assert endpoint.get("authorization") == (credentials if component == "accountant" else None)
        assert endpoint["port"] in ports
    assert not any(m["metadata"]["name"] == "gputally-metrics-token" for m in everything), "theirs is used"


def test_prometheus_gets_a_token_that_the_accountant_knows(with_operator: Any) -> None:
    found = with_operator({"monitoring": {"enabled": True}})
    (endpoint,) = found.find("ServiceMonitor", "accountant")["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]
    token = base64.b64decode(found.by_name["Secret", credentials["name"]]["data"][credentials["key"]]).decode()
    assert re.fullmatch("[A-Za-z0-9]{48}", token)
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == "gputally-accountant.metering.svc"
    authority = endpoint["tlsConfig"]["ca"]["configMap"]
    assert authority["key"] in found.by_name["ConfigMap", authority["name"]]["data"]
    accountant = found.accountant
    assert accountant.settings.metrics_token == Path(accountant.mounts["metrics"]) / "token"
    items = [{"key": credentials["key"], "path": "token"}]
    assert accountant.volumes["metrics"]["secret"] == {
        "secretName": credentials["name"],
        "defaultMode": 0o440,
        "items": items,
    }


@pytest.mark.parametrize("with_accountant", [True, False])
def test_prometheus_reads_the_fleets_pages_with_a_token_that_they_know(
    with_operator: Any, with_accountant: bool
) -> None:
    tls, tokens = {"existingSecret": "fleet-tls"}, {"existingSecret": "fleet-readers"}
    values = {program: {"enabled": with_accountant} for program in ("agent", "accountant", "fairshare")}
    values["accountant"]["lake"] = {"warehouse": "s3://books/lake"}
    values["fleet"] = {"enabled": True, "tokens": tokens, "publicUrl": "", "tls": tls}
    found = with_operator({**values, "monitoring": {"enabled": True}})
    (endpoint,) = found.find("ServiceMonitor", "fleet")["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["key"] in found.by_name["Secret", credentials["name"]]["data"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "gputally-fleet.metering.svc")
    pages = found.find("Deployment", "fleet")
    assert pages.environment["GPUTALLY_ACCOUNTANT_METRICS_TOKEN"] == f"{pages.mounts['metrics']}/token"
    secret = pages.volumes["metrics"]["secret"]
    assert secret["secretName"] == credentials["name"]
    assert secret["items"] == [{"key": credentials["key"], "path": "token"}]
    (rule,) = found.find("NetworkPolicy", "fleet")["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchExpressions"][0]["values"] == ["monitoring"]


def test_the_rules_are_those_of_the_dashboards_and_may_be_tuned(with_operator: Any) -> None:

    def rendered(**settings: Any) -> dict[str, Any]:
        values = {"monitoring": {"labels": {"release": "prometheus"}, "rules": {"enabled": True, **settings}}}
        (rule,) = with_operator(values).of("PrometheusRule")
        assert rule["metadata"]["labels"]["release"] == "prometheus"
        return {
            each.get("alert", each.get("record")): each for group in rule["spec"]["groups"] for each in group["rules"]
        }

    (ours,) = documents([prometheus_rules.render_rules()])
    assert rendered() == {
        each.get("alert", each.get("record")): each for group in ours["groups"] for each in group["rules"]
    }
    tuned = rendered(
        runbooks="https://wiki.example/gpu",
        without=["GputallyStranded"],
        **{"for": {"GputallyIdleHolder": "8h"}},
        alertLabels={"team": "platform"},
    )
    assert "GputallyStranded" not in tuned
    assert tuned["GputallyIdleHolder"]["for"] == "8h"
    assert tuned["GputallyIdleHolder"]["labels"] == {"team": "platform", "severity": "info"}
    assert tuned["GputallyXid"]["annotations"]["runbook_url"] == "https://wiki.example/gpu#gputallyxid"
    with pytest.raises(helm_python.HelmRenderError, match='there is no alert "GputallyTypo"'):
        rendered(without=["GputallyTypo"])


def test_nobody_misses_here_what_is_installed_elsewhere(with_operator: Any) -> None:
    """A cluster with agents only would always alert that no ledger answers."""
    values = {
        "monitoring": {"rules": {"enabled": True}},
        "accountant": {"enabled": False, "externalUrl": "https://10.0.0.9"},
        "fairshare": {"enabled": False},
    }
    (rule,) = with_operator(values).of("PrometheusRule")
    there = [group["name"] for group in rule["spec"]["groups"]]
    (ours,) = documents([prometheus_rules.render_rules()])
    every = [group["name"] for group in ours["groups"]]
    assert there == [name for name in every if name not in ("gputally.ledger", "gputally.fairshare")]


def test_the_notes_name_the_next_three_commands(chart: helm_python.Chart, values: dict[str, Any]) -> None:
    lines = notes(chart, values).splitlines()
    assert [line[0] for line in lines if re.match(r"\d\. ", line)] == ["1", "2", "3"]
    commands = [line.strip() for line in lines if line.startswith("     ")]
    assert len(commands) == 3
    assert {command.split()[0] for command in commands} <= {"gputally", "kubectl"}


def test_monitors_relabel_as_the_values_say(with_operator: Any) -> None:
    targets = [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}]
    metrics = [{"sourceLabels": ["__name__"], "regex": "python_.*", "action": "drop"}]
    values = {"monitoring": {"enabled": True, "relabelings": targets, "metricRelabelings": metrics}}
    monitors = [m for m in with_operator(values) if "Monitor" in m["kind"]]
    assert len(monitors) == 3
    for monitor in monitors:
        (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["relabelings"], endpoint["metricRelabelings"]) == (targets, metrics)


def settled(manifests: Rendered) -> Rendered:
    """Return the manifests without the dashboards' content, which has its own tests, and without values that differ
    between renderings."""
    for manifest in manifests:
        if manifest["metadata"]["name"].startswith("gputally-dashboard-"):
            manifest["data"] = dict.fromkeys(manifest["data"], "as dashboards/generated has it")
        made = manifest["kind"] in {"Secret", "ConfigMap"}
        if made and manifest["metadata"]["name"].endswith(("-accountant-tls", "-authority")):
            manifest["data"] = dict.fromkeys(manifest["data"], "a new one")
    return manifests


def golden(name: str, manifests: Iterable[Manifest]) -> None:
    """Compare with the golden file. GPUTALLY_GOLDEN=update rewrites it; review the difference before you commit."""
    text = yaml.safe_dump_all(map(dict, manifests), sort_keys=True)
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("GPUTALLY_GOLDEN") == "update":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "given"), [("default", {}), ("on-prem", FILES["examples/on-prem"])])
def test_the_manifests_are_the_golden_ones(render: Any, name: str, given: Values) -> None:
    golden(name, settled(render(given)))


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("presets/")])
def test_what_a_preset_changes_is_the_golden_change(render: Any, name: str) -> None:
    """The objects that differ from those of the defaults, and no missing object."""
    defaults = settled(render({})).by_name
    found = settled(render(FILES[name]))
    assert set(defaults) <= set(found.by_name)
    golden(name, [m for m in found if m != defaults.get((m["kind"], m["metadata"]["name"]))])


@pytest.fixture(scope="module")
def parent(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> helm_python.Chart:
    """A platform's chart with this chart as a dependency."""
    return helm_python.Chart.load(chart_of_charts(tmp_path_factory.mktemp("parent")))


def test_as_a_part_of_another_chart_it_makes_the_same(
    parent: helm_python.Chart, render: Any, values: dict[str, Any]
) -> None:
    """Every variation, example and preset, with other charts' keys in the parent's `global`."""
    ours = values.get("global", {})
    given = {"gputally": values, "global": {"storageClass": "fast", "security": {"allowInsecureImages": True}, **ours}}
    assert settled(rendered_by(parent, given)) == settled(render(values))
