"""Access to the accountant that the chart installs: service accounts, TLS, Prometheus, and network paths."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from accountant.cli.token_secrets import Plan
from accountant.cli.token_secrets import manifests as secrets_of
from accountant.prices.price_book import PriceBook
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import parse
from gputally.server.config_loading import validate
from gputally.server.token_review import TokenReviews
from gputally.server.tokens_and_grants import Callers, Principal
from tests.chart.conftest import JOBS, PROBES, Rendered, Values, notes
from tests.fakes.memory_ledger import NOW_MS
from tests.inventory.signed_tokens import ask, signed
from tests.inventory.token_review_server import Reviewing, account

HOST = "gputally-accountant.metering.svc"


def callers(manifests: Rendered) -> Callers:
    text = manifests.find("ConfigMap", "accountant-callers")["data"]["callers.yaml"]
    return Callers.model_validate(yaml.safe_load(text))


def test_nobody_has_to_write_a_secret(render: Any) -> None:
    manifests = render(JOBS)
    secrets = {m["metadata"]["name"] for m in manifests.of("Secret")}
    for component, spec in manifests.pod_specs():
        named_by = {v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
        assert named_by <= secrets, component
        if component != "accountant":
            (token,) = (v for v in spec["volumes"] if v["name"] == "token")
            source = {"path": "token", "audience": "gputally", "expirationSeconds": 3607}
            assert token["projected"]["sources"] == [{"serviceAccountToken": source}], component


def test_the_accountant_lets_in_the_charts_programs_each_for_what_it_does(render: Any) -> None:
    """The accounts of the pods, through token review."""
    manifests = render({**JOBS, "agent": {"namespace": {"name": "agents", "create": True}}, "clusterName": "prod"})
    found = callers(manifests)
    assert found.kubernetes is not None
    server, clock = Reviewing(), VirtualClock(NOW_MS)
    server.users, server.rights = {}, set()
    way = TokenReviews(server, clock, "prod", found.kubernetes, found.grants)
    scopes = {"agent": {"ingest"}, "fairshare": {"read", "policy"}, "backup": {"admin"}, "report": {"read"}}
    accounts = {(m["metadata"]["namespace"], m["metadata"]["name"]) for m in manifests.of("ServiceAccount")}
    for number, (component, spec) in enumerate(manifests.pod_specs()):
        if component == "accountant":
            continue
        namespace = "agents" if component == "agent" else "metering"
        assert (namespace, spec["serviceAccountName"]) in accounts
        token = signed(clock, jti=str(number))
        server.users[token] = account(spec["serviceAccountName"], "n7", namespace)
        principal = ask(way, token)
        assert set(principal.scopes) == scopes.pop(component)
        assert (principal.cluster, principal.node) == (("prod", "n7") if component == "agent" else (None, None))
    assert scopes == {}
    other = signed(clock, jti="other")
    server.users[other] = account("default", "n7", "metering")
    assert ask(way, other) == Principal(
        "system:serviceaccount:metering:default", frozenset(), teams=frozenset(), progress_teams=frozenset()
    )


def test_the_operators_callers_stay_and_the_programs_are_added(render: Any) -> None:
    text = """
schema: 1
kubernetes: {rights: true, agents: [old/agent]}
grants: [{groups: [platform], scopes: [admin]}]
certificates: [{name: lab-n1, cluster: lab, node: n1}]
"""
    found = callers(render({"accountant": {"callers": {"text": text}}}))
    assert found.kubernetes is not None
    assert found.kubernetes.rights
    assert found.kubernetes.agents == ("old/agent", "metering/gputally-agent")
    assert [(g.groups, g.users) for g in found.grants] == [
        (("platform",), ()), ((), ("system:serviceaccount:metering:gputally-fairshare",)),
    ]  # fmt: skip
    assert [c.name for c in found.certificates] == ["lab-n1"]


def test_a_secret_that_is_named_wins(render: Any) -> None:
    manifests = render({"agent": {"token": {"existingSecret": "one-node", "key": "k"}}})
    items = [{"key": "k", "path": "token"}]
    assert manifests.agent.volumes["token"]["secret"] == {
        "secretName": "one-node",
        "defaultMode": 0o400,
        "items": items,
    }
    found = callers(manifests)
    assert found.kubernetes is not None
    assert found.kubernetes.agents == ()


def shaken_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Do a TLS handshake in memory. Raises ssl.SSLError."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(here, there, server_hostname=host)
    answering = server.wrap_bio(there, here, server_side=True)
    for _ in range(4):
        for side in (asking, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert asking.version() == "TLSv1.3"


def test_by_default_the_accountant_has_a_certificate_that_its_clients_trust(render: Any, tmp_path: Path) -> None:
    manifests = render({**JOBS, "agent": {"namespace": {"name": "agents", "create": True}}})
    maps = {(m["metadata"]["namespace"], m["metadata"]["name"]) for m in manifests.of("ConfigMap")}
    assert {("agents", "gputally-authority"), ("metering", "gputally-authority")} <= maps
    found = manifests
    pair = {key: base64.b64decode(text) for key, text in found.find("Secret", "accountant-tls")["data"].items()}
    for name, content in pair.items():
        (tmp_path / name).write_bytes(content)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    trusting = ssl.create_default_context(cadata=found.find("ConfigMap", "authority")["data"]["ca.crt"])
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    for host in (HOST, "127.0.0.1", "localhost", "gputally-accountant"):
        shaken_hands(server, trusting, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shaken_hands(server, trusting, "another.metering.svc")
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        shaken_hands(server, ssl.create_default_context(), HOST)


OWN_TLS = {"tls": {"existingSecret": "tls"}, "authority": {"existingConfigMap": "authorities", "key": "bundle"}}


@pytest.mark.parametrize(
    ("accountant", "authority", "key"),
    [({}, "gputally-authority", "ca.crt"), (OWN_TLS, "authorities", "bundle")],
    ids=["self-signed", "named"],
)
def test_everything_of_the_chart_asks_over_tls_and_trusts_the_authority(
    render: Any, accountant: Values, authority: str, key: str
) -> None:
    manifests = render({**JOBS, "accountant": accountant})
    server = manifests.accountant.container
    assert {"--tls-cert=/etc/gputally/tls/tls.crt", "--tls-key=/etc/gputally/tls/tls.key"} <= set(server["args"])
    assert not any(argument.startswith("--tls-client-ca") for argument in server["args"])
    assert {server[probe]["httpGet"]["scheme"] for probe in PROBES} == {"HTTPS"}
    asking = [(c, spec) for c, spec in manifests.pod_specs() if c != "accountant"]
    assert len(asking) == 4
    for component, spec in asking:
        (volume,) = (v for v in spec["volumes"] if v["name"] == "authority")
        assert volume["configMap"] == {"name": authority, "items": [{"key": key, "path": "ca.crt"}]}, component
        assert "tls" not in {v["name"] for v in spec["volumes"]}
        for one in spec["containers"]:
            assert "--ca-file=/etc/gputally/authority/ca.crt" in one["args"]
            assert f"--url=https://{HOST}:8080" in one["args"]


def test_plain_http_is_asked_for_and_warned_of(render: Any, chart: helm_python.Chart) -> None:
    values = {"accountant": {"tls": {"enabled": False}}}
    manifests = render(values)
    assert manifests.of("Secret") == []
    assert "gputally-authority" not in str(manifests)
    accountant = manifests.accountant.container
    assert not any(argument.startswith("--tls") for argument in accountant["args"])
    assert accountant["readinessProbe"]["httpGet"]["scheme"] == "HTTP"
    told = notes(chart, values)
    assert "WARNING: accountant.tls.enabled is false" in told
    assert "http://127.0.0.1:8080" in told
    assert "WARNING" not in notes(chart, {})


def test_cert_manager_makes_the_certificate_where_an_issuer_is_named(render: Any) -> None:
    tls = {"certManager": {"issuerRef": {"name": "internal", "kind": "Issuer"}}}
    found = render({"accountant": {"tls": tls, "authority": {"existingConfigMap": "ours", "key": "bundle"}}})
    spec = found.find("Certificate", "accountant-tls")["spec"]
    assert spec["issuerRef"] == {"name": "internal", "kind": "Issuer", "group": "cert-manager.io"}
    assert HOST in spec["dnsNames"]
    assert not found.of("Secret")
    accountant = found.accountant.volumes
    assert accountant["tls"]["secret"]["secretName"] == spec["secretName"]
    assert found.agent.volumes["authority"]["configMap"]["name"] == "ours"


@pytest.mark.parametrize(
    ("url", "cidrs", "to", "port"),
    [
        ("https://accountant.example", ["203.0.113.7/32"], "203.0.113.7/32", 443),
        ("https://accountant.example:8443/base", ["2001:db8::/64"], "2001:db8::/64", 8443),
        ("http://10.1.2.3", [], "10.1.2.3/32", 80),
        ("https://10.1.2.3:8080", [], "10.1.2.3/32", 8080),
    ],
)
def test_to_an_accountant_elsewhere_there_is_one_way_out(
    render: Any, url: str, cidrs: list[str], to: str, port: int
) -> None:
    accountant = {"enabled": False, "externalUrl": url}
    found = render({"accountant": accountant, "networkPolicy": {"accountantCidrs": cidrs, "apiServerPorts": [7443]}})
    for component in ("agent", "fairshare"):
        out = found.find("NetworkPolicy", f"{component}").ways_out
        assert set(out) == {53, 7443, port}, "names, the API server, the accountant"
        assert out[port] == [{"ipBlock": {"cidr": to}}]


def test_agents_reach_a_dcgm_exporter_where_its_addresses_are_named(render: Any) -> None:
    cidrs = {"networkPolicy": {"dcgmCidrs": ["10.40.0.0/16"]}}
    agent, fairshare = (render(cidrs).find("NetworkPolicy", name) for name in ("agent", "fairshare"))
    assert agent.ways_out[9400] == [{"ipBlock": {"cidr": "10.40.0.0/16"}}]
    assert 9400 not in fairshare.ways_out
    assert 9400 not in render({}).find("NetworkPolicy", "agent").ways_out


def test_no_policy_lets_anything_out_to_everywhere(manifests: Rendered) -> None:
    for policy in manifests.of("NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            assert rule.get("to"), policy["metadata"]["name"]
            assert rule.get("ports"), policy["metadata"]["name"]


@pytest.mark.parametrize("user", [0, 65532])
def test_the_agent_runs_as_the_user_that_is_asked_for(render: Any, user: int) -> None:
    agent = render({"agent": {"runAsUser": user, "runAsGroup": 0}}).agent
    context = agent.container["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["runAsNonRoot"]) == (user, 0, user != 0)
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_a_hook_makes_the_tokens_where_it_is_asked_for(render: Any) -> None:
    assert not any("helm.sh/hook" in m["metadata"].get("annotations", {}) for m in render({}) if m["kind"] != "Pod")
    found = render({**JOBS, "accountant": {"tokens": {"create": True}}})
    job = found.find("Job", "tokens")
    assert job.container["args"] == ["install", "--namespace=metering", "--name=gputally"]
    assert found.accountant.volumes["tokens"]["secret"]["secretName"] == "gputally-accountant-tokens"
    hooks = [m for m in found if m["metadata"]["name"] == "gputally-tokens"]
    assert {m["kind"] for m in hooks} == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Job"}
    for manifest in hooks:
        notes = manifest["metadata"]["annotations"]
        assert notes["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert notes["helm.sh/hook-weight"] == ("0" if manifest["kind"] == "Job" else "-5")
    assert set(found.find("NetworkPolicy", "tokens").ways_out) == {443, 6443}


def test_without_reviews_the_hook_makes_the_programs_tokens_too(render: Any) -> None:
    """The pods mount the secrets that the hook creates."""
    values = {**JOBS, "agent": {"enabled": False}, "accountant": {"kubernetesApi": False, "tokens": {"create": True}}}
    manifests = render(values)
    found = manifests
    assert found.find("Job", "tokens").container["args"][-1] == "--programs"
    plan = Plan("gputally", "metering", programs=True)
    secrets = {m["metadata"]["name"]: m["stringData"] for m in secrets_of(plan, {})}
    (rule, _) = found.find("Role", "tokens")["rules"]
    assert set(rule["resourceNames"]) == set(secrets)
    for component, spec in manifests.pod_specs():
        for volume in (v for v in spec.get("volumes", []) if v["name"] in {"token", "tokens"}):
            (item,) = volume["secret"]["items"]
            assert item["key"] in secrets[volume["secret"]["secretName"]], component


def test_the_notes_say_what_is_an_example(chart: helm_python.Chart) -> None:
    assert "prices are EXAMPLES" in notes(chart, {})
    assert "policy is an EXAMPLE" in notes(chart, {})
    own = {"accountant": {"prices": {"text": "schema: 1\n"}}, "fairshare": {"policy": {"text": "schema: 1\n"}}}
    assert "EXAMPLE" not in notes(chart, own)
    maps = {"accountant": {"prices": {"existingConfigMap": "a"}}, "fairshare": {"policy": {"existingConfigMap": "b"}}}
    assert "EXAMPLE" not in notes(chart, maps)
    assert "kubectl -n metering create token gputally-fairshare --audience=gputally" in notes(chart, {})
    assert "gputally install --namespace metering" in notes(chart, {"fairshare": {"enabled": False}})


def test_the_default_prices_are_examples_by_their_source_and_in_every_line(render: Any) -> None:
    text = render({}).find("ConfigMap", "accountant-prices")["data"]["prices.yaml"]
    book = validate(parse(text, "prices.yaml"), PriceBook)
    assert book.has_examples
    assert {row.source for row in book.rows} == {"example"}
    assert all(row.id.startswith("example-") for row in book.rows), "a bill names the row of each line"
    assert book.unit_price("NVIDIA H100 80GB HBM3", NOW_MS) is not None
