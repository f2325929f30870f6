"""values.yaml and its schema: closed, complete, commented and strict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.chart.conftest import FLEET, Values, refused

PASSED_ON = {
    "affinity", "valueFrom", "items", "podSecurityContext", "securityContext", "dnsConfig", "extraVolume",
    "extraVolumeMount", "relabeling", "topologySpreadConstraint", "global",
}  # fmt: skip
"""Objects of Kubernetes that are passed on as they are; the API server knows their shape. `global` has other charts'
keys."""

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown key", {"agnet": {}}, "agnet"),
    ("an unknown inner key", {"agent": {"intervall": 60}}, "intervall"),
    ("an unknown key of an image", {"agent": {"image": {"name": "a"}}}, "name"),
    ("an interval that does not divide 900", {"agent": {"intervalSeconds": 61}}, "intervalSeconds"),
    ("a reading too rarely", {"agent": {"sampleSeconds": 6}}, "sampleSeconds"),
    ("text for a number", {"agent": {"port": "9401"}}, "port"),
    ("a port that is none", {"fairshare": {"port": 70000}}, "port"),
    ("an unknown privilege", {"agent": {"privilege": "root"}}, "privilege"),
    ("a relative spool", {"agent": {"spool": {"hostPath": "spool"}}}, "hostPath"),
    ("relative log folders", {"agent": {"podLogsHostPath": "pods"}}, "podLogsHostPath"),
    ("a relative folder of the kubelet", {"agent": {"podResourcesHostPath": "kubelet"}}, "podResourcesHostPath"),
    ("labels as one text", {"agent": {"exportPodLabels": "team,project"}}, "exportPodLabels"),
    ("a sharing system that is no name", {"agent": {"gpuSharing": ["My Own"]}}, "gpuSharing"),
    ("a label with a comma", {"agent": {"exportPodLabels": ["team,project"]}}, "exportPodLabels"),
    ("an audience with a space", {"agent": {"token": {"audience": "a b"}}}, "audience"),
    ("a release file elsewhere", {"agent": {"releaseFile": "../run/release"}}, "releaseFile"),
    ("the spool as release file", {"agent": {"releaseFile": "outbox.sqlite"}}, "releaseFile"),
    ("an unbounded spool", {"agent": {"spool": {"maxMebibytes": 0}}}, "maxMebibytes"),
    ("a digest that is none", {"accountant": {"image": {"digest": "latest"}}}, "digest"),
    ("a size without a unit", {"accountant": {"persistence": {"size": "20"}}}, "size"),
    ("a price book as an object", {"accountant": {"prices": {"text": {"schema": 1}}}}, "text"),
    ("an open port to a name", {"accountant": {"opencost": {"from": ["finops"]}}}, "from"),
    ("an address that is no URL", {"accountant": {"externalUrl": "accountant:8080"}}, "externalUrl"),
    ("a negative quantity", {"accountant": {"resources": {"limits": {"memory": -1}}}}, "memory"),
    ("a GPU for a program of ours", {"agent": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "nvidia.com/gpu"),
    ("a cycle of no time", {"fairshare": {"intervalSeconds": 0}}, "intervalSeconds"),
    ("a host with a port", {"hosts": ["gpus.example.com:9003"]}, "hosts"),
    ("an empty cluster name", {"clusterName": ""}, "clusterName"),
    ("a secret in the values", {"agent": {"token": {"value": "secret"}}}, "value"),
    ("a name in capitals", {"fullnameOverride": "GPU"}, "fullnameOverride"),
    ("an environment variable without a name", {"agent": {"extraEnv": [{"value": "x"}]}}, "extraEnv"),
    ("a policy of pulling", {"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ("an address range", {"networkPolicy": {"apiServerCidr": "anywhere"}}, "apiServerCidr"),
    ("a scrape interval", {"monitoring": {"interval": 30}}, "interval"),
    ("a pool with an unknown key", {"agent": {"pools": {"a": {"port": 1}}}}, "port"),
    ("a pool whose name is none", {"agent": {"pools": {"A_b": {}}}}, "A_b"),
    ("a pool of unknown privilege", {"agent": {"pools": {"a": {"privilege": "all"}}}}, "privilege"),
    ("a relative driver", {"agent": {"driverHostPath": "nvidia"}}, "driverHostPath"),
    ("a key in the values", {"accountant": {"tls": {"key": "-----BEGIN"}}}, "key"),
    ("an archive every now and then", {"accountant": {"archive": {"every": "often"}}}, "every"),
    ("an archive by FTP", {"accountant": {"archive": {"enabled": True, "to": "ftp://books"}}}, "archive/to"),
    ("no backups at all", {"accountant": {"backups": {"keep": 0}}}, "keep"),
    ("a schedule of three fields", {"backup": {"schedule": "0 3 *"}}, "schedule"),
    ("a form of report", {"report": {"formats": ["Word document"]}}, "formats"),
    ("a report in no form", {"report": {"formats": []}}, "formats"),
    ("a name for an address range", {"networkPolicy": {"issuerCidrs": ["login.example"]}}, "issuerCidrs"),
    ("a secret of the login in the values", {"fairshare": {"pages": {"signIn": {"secret": "x"}}}}, "secret"),
    ("an address without a scheme", {"fairshare": {"pages": {"publicUrl": "gpus.example"}}}, "publicUrl"),
    ("a pod's label that is no text", {"fairshare": {"podLabels": {"a": 1}}}, "podLabels"),
    ("a label that selects", {"commonLabels": {"app.kubernetes.io/instance": "x"}}, "app.kubernetes.io/instance"),
    ("many writers", {"accountant": {"persistence": {"accessMode": "ReadWriteMany"}}}, "accessMode"),
    ("an argument that is none", {"agent": {"extraArgs": ["agent run"]}}, "extraArgs"),
    ("a mount nowhere", {"accountant": {"extraVolumeMounts": [{"name": "a"}]}}, "mountPath"),
    ("a DNS policy", {"agent": {"dnsPolicy": "Mine"}}, "dnsPolicy"),
    ("a constraint of no topology", {"accountant": {"topologySpreadConstraints": [{"maxSkew": 1}]}}, "topologyKey"),
    ("a URL for a host", {"accountant": {"ingress": {"hosts": ["https://gpus.example"]}}}, "hosts"),
    ("a route to no Gateway", {"accountant": {"httpRoute": {"parentRefs": [{}]}}}, "name"),
    (
        "an operator of selectors",
        {"monitoring": {"namespaceSelector": {"matchExpressions": [{"key": "a"}]}}},
        "operator",
    ),
    ("a global registry that is none", {"global": {"imageRegistry": 5}}, "imageRegistry"),
    ("two disturbed at a time", {"accountant": {"podDisruptionBudget": {"maxUnavailable": 2}}}, "maxUnavailable"),
]


@pytest.mark.parametrize(("what", "values", "place"), BAD, ids=[what for what, _, _ in BAD])
def test_bad_values_are_refused_with_their_place(
    chart: helm_python.Chart, what: str, values: dict[str, Any], place: str
) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        chart.render(values, name="gputally", namespace="metering")
    assert place in str(refusal.value)


_SESSION = {"sessionKey": {"existingSecret": "s"}}
_SIGN_IN = {"enabled": True, "publicUrl": "https://fairshare.example", "signIn": _SESSION}
_PAGES = {"pages": {"ingress": {"enabled": True, "hosts": ["a.example"]}}}
_ELSEWHERE = {"enabled": False, "externalUrl": "https://accountant.example"}
_OWN = "belongs to an address of the pages' own: set fairshare.pages.publicUrl, or leave this empty"
_GATEWAY = {
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "web"}]},
    "tls": {"existingSecret": "tls"},
    "authority": {"existingConfigMap": "ours", "key": "bundle.pem"},
}
_NO_CALLERS = {"accountant": {"kubernetesApi": False}, "agent": {"enabled": False}, "fairshare": {"enabled": False}}


def _fleet(**changed: Any) -> Values:
    return {**FLEET, "fleet": {**FLEET["fleet"], **changed}}


def _at_the_accountants_address(**pages: Any) -> Values:
    """The controller's pages there, with values of their own."""
    people = {"publicUrl": "https://gpus.example", "callers": {"text": "schema: 1\n"}, "signIn": _SESSION}
    return {"accountant": people, "fairshare": {"pages": {"enabled": True, **pages}}}


REFUSED: list[tuple[Values, str]] = [
    ({"accountant": {"callers": {"text": "kubernetes: {audience: other}"}}},
     'audience is "other", and agent.token.audience "gputally"'),
    ({"accountant": {"callers": {"text": "{"}}}, "accountant.callers.text: error converting YAML"),
    ({"accountant": {"kubernetesApi": False}},
     "agent.token: the accountant cannot have a service account token reviewed"),
    ({"accountant": {"tls": {"enabled": False, "existingSecret": "s"}}},
     "accountant.tls.existingSecret: accountant.tls.enabled"),
    ({"accountant": {"tls": {"clientCertificates": True}}},
     "accountant.tls.clientCertificates: the self-signed authority"),
    ({"accountant": {"tokens": {"create": True, "existingSecret": "mine"}}},
     "accountant.tokens: create makes the Secret"),
    ({"accountant": {"enabled": False}}, "accountant.externalUrl: needed"),
    ({"accountant": _ELSEWHERE}, "networkPolicy.accountantCidrs: the address ranges"),
    ({"accountant": {"ingress": {"enabled": True}}}, "accountant.ingress.hosts: needs a host"),
    ({"accountant": {"httpRoute": {"enabled": True}}}, "accountant.httpRoute.parentRefs: needs the Gateway"),
    ({"accountant": _GATEWAY}, "accountant.httpRoute.backendTLS: a Gateway reads"),
    ({"accountant": {"replicas": 2}}, "set accountant.archive.enabled"),
    (_NO_CALLERS, "accountant: no caller could ask it"),
    ({"agent": {"runAsUser": 65532, "privilege": "profiling"}}, "agent.runAsUser: "),
    ({"agent": {"runAsUser": 65532, "privilege": "process", "accountingMode": True}}, "agent.runAsUser: "),
    ({"agent": {"podLabels": ["team"]}}, "ledger is agent.exportPodLabels: rename it"),
    ({"agent": {"pools": {"a": {"podLabels": ["team"]}}}}, "ledger is agent.exportPodLabels: rename it"),
    ({"agent": {"namespace": {"create": True}}}, "needs agent.namespace.name"),
    ({"agent": {"accountingMode": True}}, "agent.accountingMode"),
    ({"image": {"registry": ""}}, "image.registry: is empty"),
    ({"monitoring": {"enabled": True}}, "monitoring.coreos.com/v1"),
    ({"monitoring": {"rules": {"enabled": True}}}, "monitoring.rules.enabled: "),
    ({"monitoring": {"rules": {"enabled": True}}}, "monitoring.coreos.com/v1"),
    ({"fairshare": {"pages": {"enabled": True}}}, "fairshare.pages: no caller could open them"),
    ({"fairshare": {"pages": {"enabled": True}},
      "accountant": {"publicUrl": "https://gpus.example", "callers": {"existingConfigMap": "c"}}},
     "accountant.signIn.sessionKey.existingSecret"),
    ({"fairshare": _PAGES}, "fairshare.pages.enabled is false"),
    ({"fairshare": {"pages": _SIGN_IN}}, "set fairshare.pages.callers or accountant.callers"),
    ({"fairshare": {"pages": {**_SIGN_IN, "callers": {"existingConfigMap": "c"}, "signIn": {}}}},
     "needs fairshare.pages.signIn.sessionKey.existingSecret"),
    ({"fairshare": {"pages": _SIGN_IN},
      "accountant": {"enabled": False, "externalUrl": "https://10.0.0.9", "callers": {"text": "schema: 1\n"}}},
     "set fairshare.pages.callers"),
    (_at_the_accountants_address(callers={"text": "schema: 1\n"}), f"fairshare.pages.callers.text: {_OWN}"),
    (_at_the_accountants_address(callers={"existingConfigMap": "c"}),
     f"fairshare.pages.callers.existingConfigMap: {_OWN}"),
    (_at_the_accountants_address(signIn={"session": "30m"}), f"fairshare.pages.signIn.session: {_OWN}"),
    (_at_the_accountants_address(signIn={"existingSecret": "s"}), f"fairshare.pages.signIn.existingSecret: {_OWN}"),
    (_at_the_accountants_address(signIn=_SESSION), f"fairshare.pages.signIn.sessionKey.existingSecret: {_OWN}"),
    (_at_the_accountants_address(accountantUrl="https://a.example"), f"fairshare.pages.accountantUrl: {_OWN}"),
    ({"accountant": {"tokens": {"existingSecret": "t"}},
      "fairshare": {"pages": {"enabled": True, "callers": {"existingConfigMap": "c"}}}},
     f"fairshare.pages.callers.existingConfigMap: {_OWN}"),
    (_at_the_accountants_address(publicUrl="https://GPUS.example/", signIn=_SESSION),
     "fairshare.pages.publicUrl: is the address of accountant.publicUrl"),
    ({**_fleet(publicUrl="https://fairshare.example"),
      "fairshare": {"pages": {**_SIGN_IN, "callers": {"existingConfigMap": "c"}}},
      "networkPolicy": {"accountantCidrs": ["10.0.0.9/32"]},
      "accountant": {**FLEET["accountant"], "externalUrl": "https://10.0.0.9"}},
     "fairshare.pages.publicUrl: is the address of fleet.publicUrl"),
    ({"fleet": {"enabled": True}}, "set accountant.lake.warehouse"),
    (_fleet(tokens={}, callers={}, publicUrl="", ingress={}), "no caller could read it"),
    (_fleet(engineUrl=""), "trino runs elsewhere: set fleet.engineUrl"),
    (_fleet(engine="duckdb"), "duckdb takes no address"),
    (_fleet(callers={}), "people sign in with the issuers of a callers file"),
    (_fleet(signIn={}), "needs fleet.signIn.sessionKey.existingSecret"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), REFUSED)
def test_values_that_cannot_work_together_are_refused_with_the_reason(
    chart: helm_python.Chart, values: Values, words: str
) -> None:
    assert words in refused(chart, values)


def schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for key, inner in schema.items():
            yield from schemas(inner, f"{path}/{key}")


def test_the_schema_is_closed_everywhere(folder: Path) -> None:
    found = list(schemas(json.loads((folder / "values.schema.json").read_text())))
    assert len(found) > 20
    for path, schema in found:
        if path.rsplit("/", 1)[-1] not in PASSED_ON:
            extra = schema.get("additionalProperties", True)
            pools = path.endswith("/pools") and extra == {"$ref": "#/definitions/pool"}
            assert extra is False or extra == {"type": "string"} or pools, path


def properties(schema: dict[str, Any], root: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value in the schema, through its references."""
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rsplit("/", 1)[-1]]
    for key, inner in schema.get("properties", {}).items():
        yield (*path, key)
        yield from properties(inner, root, (*path, key))


def test_schema_and_values_know_the_same_keys(folder: Path) -> None:
    schema = json.loads((folder / "values.schema.json").read_text())
    values = yaml.safe_load((folder / "values.yaml").read_text())

    def keys(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        if isinstance(node, dict):
            for key, inner in node.items():
                yield (*path, key)
                yield from keys(inner, (*path, key))

    open_maps = {"resources", "nodeSelector", "pools", "dns", "namespaceSelector"}
    given = {path for path in keys(values) if not set(path[:-1]) & open_maps}
    known = {path for path in properties(schema, schema) if not set(path[:-1]) & open_maps}
    assert given == known


def test_every_value_has_its_meaning_above_it(folder: Path) -> None:
    lines = (folder / "values.yaml").read_text().splitlines()
    root = yaml.compose((folder / "values.yaml").read_text())

    def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int, bool]]:
        for key, value in node.value:
            inner = (*path, key.value)
            group = isinstance(value, yaml.MappingNode) and value.value and not value.flow_style
            yield inner, key.start_mark.line, bool(group)
            if group and key.value not in {"resources", "nodeSelector", "dns"}:
                yield from leaves(value, inner)

    for path, line, group in leaves(root):
        commented = lines[line - 1].strip().startswith("#")
        assert commented or (group and path[-1] not in {"resources", "nodeSelector"}), ".".join(path)
