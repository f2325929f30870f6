"""Options in the values: pools and a namespace of agents, TLS, archive, jobs, budgets, egress."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from accountant.core.settings import load as accountant_settings
from accountant.prices.price_book import load as load_prices
from agent.simulation.scenario_file import load_scenario
from fairshare.core.settings import ControllerSettings as FairshareSettings
from fairshare.core.settings import load as fairshare_settings
from gputally.__main__ import main
from gputally.server.tokens_and_grants import Callers
from tests.chart.conftest import COMPONENT, FILES, FLEET, Manifest, chart_of_charts, documents, notes


def controller_settings(workload: Manifest) -> FairshareSettings:
    """Return the settings that the controller reads from its environment."""
    told = {name: value for name, value in workload.environment.items() if name.startswith("GPUTALLY_")}
    return fairshare_settings(None, told, {"policy": "policy.yaml"})


def test_every_port_without_credentials_gets_the_public_names(render: Any) -> None:
    names = {"hosts": ["gpus.example.com", "metrics.example.com"]}
    more = {"fairshare": {"extender": {"enabled": True}},
            "accountant": {"kaiUsage": {"enabled": True}, "opencost": {"enabled": True}}}  # fmt: skip
    found, plain = render(names | more), render(more)
    (agents,) = found.of("DaemonSet")
    assert "--hosts=gpus.example.com,metrics.example.com" in agents.pod["containers"][0]["args"]
    ports = (found.accountant.settings.kai_usage, found.accountant.settings.opencost)
    assert [*controller_settings(found.fairshare).hosts] == names["hosts"]
    assert [[*port.hosts] for port in ports if port is not None] == [names["hosts"]] * 2
    assert "HOSTS" not in str(list(plain))


def test_each_pool_has_agents_of_its_own_values(render: Any) -> None:
    common = {"runtimeClassName": "nvidia", "privileged": True, "nodeSelector": {"gpu": "yes"}}
    pools = {
        "mig": {"privilege": "profiling", "nodeSelector": {"pool": "mig"}},
        "desks": {"privileged": False, "runtimeClassName": "", "privilege": "process"},
    }
    sets = {m["metadata"]["name"]: m for m in render({"agent": {**common, "pools": pools}}).of("DaemonSet")}
    assert set(sets) == {"gputally-agent-mig", "gputally-agent-desks"}, "and none for the rest: two would share a spool"
    mig, desks = (sets[f"gputally-agent-{name}"].pod for name in ("mig", "desks"))
    assert mig["nodeSelector"] == {"gpu": "yes", "pool": "mig"}
    assert (mig["runtimeClassName"], desks.get("runtimeClassName")) == ("nvidia", None)
    assert "--privilege=profiling" in mig["containers"][0]["args"]
    assert "--privilege=process" in desks["containers"][0]["args"]
    assert [spec["containers"][0]["securityContext"]["privileged"] for spec in (mig, desks)] == [True, False]
    selectors = [m["spec"]["selector"]["matchLabels"] for m in sets.values()]
    assert len({tuple(sorted(selector.items())) for selector in selectors}) == 2


def test_sessions_are_signed_with_a_key_by_reference(render: Any, tmp_path: Path) -> None:
    """The accountant starts with the chart's settings, and the secrets are at the paths that it reads."""
    plain = render({}).accountant
    assert plain.environment["GPUTALLY_ACCOUNTANT_SESSION"] == "8h"
    assert "GPUTALLY_ACCOUNTANT_SESSION_KEY" not in plain.environment
    sign_in = {"session": "30m", "existingSecret": "login", "sessionKey": {"existingSecret": "s", "key": "k"}}
    found = render({"accountant": {"publicUrl": "https://gpus.example", "signIn": sign_in}})
    workload = found.accountant
    secrets = {name: volume.get("secret") for name, volume in workload.volumes.items()}
    assert secrets["login"] == {"secretName": "login", "defaultMode": 0o440}
    assert secrets["session"] == {
        "secretName": "s", "defaultMode": 0o440, "items": [{"key": "k", "path": "session.key"}],
    }  # fmt: skip
    settings = workload.settings
    assert settings.session == 30 * 60
    assert settings.session_key == Path(workload.mounts["session"]) / "session.key"
    assert settings.public_url == "https://gpus.example"
    assert workload.mounts["login"] == "/etc/gputally/login"


def test_people_sign_in_to_the_controllers_pages_with_secrets_by_reference(render: Any) -> None:
    """The controller starts with the chart's settings; its own secrets and callers take precedence over the
    accountant's."""
    tokens = {"existingSecret": "tokens"}
    alone = render({"fairshare": {"pages": {"enabled": True}}, "accountant": {"tokens": tokens}})
    plain = alone.fairshare.environment
    assert not {name for name in plain if "PAGES_CALLERS" in name or "PAGES_SESSION" in name}
    own = {
        "callers": {"text": "schema: 1\n"},
        "signIn": {"session": "30m", "existingSecret": "mine", "sessionKey": {"existingSecret": "s", "key": "k"}},
    }
    theirs = {"callers": {"text": "schema: 1\n"}, "signIn": {"existingSecret": "theirs"}}
    network = {"issuerCidrs": ["203.0.113.0/24"], "issuerPorts": [8443]}
    for given, login, callers in (
        (own, "mine", "gputally-fairshare-callers"),
        ({"signIn": {"sessionKey": {"existingSecret": "s"}}}, "theirs", "gputally-accountant-callers"),
    ):
        pages = {"enabled": True, "publicUrl": "https://fairshare.example", **given}
        values = {"fairshare": {"pages": pages}, "accountant": theirs, "networkPolicy": network}
        found = render(values)
        workload = found.fairshare
        assert ("ConfigMap", callers) in found.by_name
        sources = workload.volumes
        assert sources["login"]["secret"] == {"secretName": login, "defaultMode": 0o440}
        assert sources["callers"]["configMap"] == {"name": callers}
        (item,) = sources["session"]["secret"]["items"]
        assert (sources["session"]["secret"]["secretName"], item["path"]) == ("s", "session.key")
        places = workload.mounts
        settings = controller_settings(workload)
        assert settings.pages_session == (30 * 60 if login == "mine" else 8 * 3600)
        assert settings.pages_session_key == Path(places["session"]) / "session.key"
        assert settings.pages_callers == Path(places["callers"]) / "callers.yaml"
        assert settings.pages_public_url == "https://fairshare.example"
        assert places["login"] == "/etc/gputally/login", "where client_secret_file points, as at the accountant"
        out = found.find("NetworkPolicy", "fairshare").ways_out
        assert out[8443] == [{"ipBlock": {"cidr": "203.0.113.0/24"}}]


ONE_ADDRESS = {
    "accountant": {
        "publicUrl": "https://gpus.example",
        "ingress": {"enabled": True, "className": "nginx", "annotations": {"a": "of the accountant"}},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "web"}]},
        "callers": {"text": "schema: 1\n"},
        "signIn": {
            "session": "30m",
            "existingSecret": "login",
            "sessionKey": {"existingSecret": "session", "key": "k"},
        },
    },
    "fairshare": {"pages": {"enabled": True, "tls": {"existingSecret": "pages-tls"}}},
    "networkPolicy": {"issuerCidrs": ["203.0.113.0/24"], "issuerPorts": [8443]},
}


def test_accountant_and_controller_have_one_address_and_one_sign_in(render: Any) -> None:
    found = render(ONE_ADDRESS)
    (rule,) = found.find("Ingress", "accountant")["spec"]["rules"]
    backends = {path["path"]: path["backend"]["service"]["name"] for path in rule["http"]["paths"]}
    assert backends == {"/": "gputally-accountant", "/shares": "gputally-pages"}
    assert [ingress["metadata"]["name"] for ingress in found.of("Ingress")] == ["gputally-accountant"]
    shares, rest = found.find("HTTPRoute", "accountant")["spec"]["rules"]
    assert shares["matches"] == [{"path": {"type": "PathPrefix", "value": "/shares"}}]
    assert [each["backendRefs"][0]["name"] for each in (shares, rest)] == ["gputally-pages", "gputally-accountant"]
    settings, controller = (
        accountant_settings(None, found.accountant.environment, {"tokens": "t"}),
        controller_settings(found.fairshare),
    )
    assert (settings.controller_pages, controller.pages_accountant) == ("/", "/")
    assert settings.public_url == controller.pages_public_url == "https://gpus.example"
    sources = [workload.volumes["session"]["secret"] for workload in (found.accountant, found.fairshare)]
    assert sources[0] == sources[1]
    files = [workload.volumes["callers"]["configMap"] for workload in (found.accountant, found.fairshare)]
    assert files[0] == files[1], "what one grants the other grants"
    assert settings.session == controller.pages_session == 30 * 60
    assert "login" not in found.fairshare.volumes, "only the accountant signs people in"
    assert 8443 not in found.find("NetworkPolicy", "fairshare").ways_out


def test_who_reaches_the_accountants_pages_reaches_the_controllers_at_its_address(render: Any) -> None:
    def reached(**pages: Any) -> list[str]:
        values = {**ONE_ADDRESS, "fairshare": {"pages": {"enabled": True, **pages}}}
        found = render({**values, "networkPolicy": {"accountantFrom": [{"name": "web"}]}})
        (rule,) = found.find("NetworkPolicy", "pages")["spec"]["ingress"]
        return [peer["namespaceSelector"]["matchLabels"]["name"] for peer in rule["from"]]

    assert reached() == ["web"]
    assert reached(**{"from": [{"name": "other"}]}) == ["other"]
    own = {"publicUrl": "https://fairshare.example", "signIn": {"sessionKey": {"existingSecret": "s"}}}
    assert reached(**own, **{"from": [{"name": "other"}]}) == ["other"]
    with pytest.raises(KeyError):
        reached(**own)


def test_the_pages_service_says_that_it_speaks_https(render: Any) -> None:
    for pages, protocol in (({}, None), ({"tls": {"existingSecret": "s"}}, "https")):
        found = render({**ONE_ADDRESS, "fairshare": {"pages": {"enabled": True, **pages}}})
        (port,) = found.find("Service", "pages")["spec"]["ports"]
        assert port.get("appProtocol") == protocol


def test_pages_that_speak_http_have_an_ingress_of_their_own_at_the_same_host(render: Any) -> None:
    pages = {"enabled": True, "ingress": {"annotations": {"a": "of the pages"}}}
    found = render({**ONE_ADDRESS, "fairshare": {"pages": pages}})
    for name, path, note in (("accountant", "/", "of the accountant"), ("pages", "/shares", "of the pages")):
        ingress = found.find("Ingress", name)
        (rule,) = ingress["spec"]["rules"]
        assert (rule["host"], [each["path"] for each in rule["http"]["paths"]]) == ("gpus.example", [path])
        assert ingress["metadata"]["annotations"] == {"a": note}
        assert ingress["spec"]["ingressClassName"] == "nginx"


def test_pages_with_an_address_of_their_own_are_in_the_menu_with_it(render: Any) -> None:
    pages = {
        "enabled": True,
        "publicUrl": "https://fairshare.example/",
        "signIn": {"sessionKey": {"existingSecret": "s"}},
    }
    found = render({**ONE_ADDRESS, "fairshare": {"pages": pages}})
    assert (
        accountant_settings(None, found.accountant.environment, {"tokens": "t"}).controller_pages
        == "https://fairshare.example"
    )
    controller = controller_settings(found.fairshare)
    assert controller.pages_accountant == "https://gpus.example"
    assert controller.pages_session == 30 * 60, "the accountant's, without one of their own"
    assert found.fairshare.volumes["session"]["secret"]["secretName"] == "s"


def test_agents_accountant_and_controller_call_the_cluster_the_same(render: Any) -> None:
    """A controller with another cluster name than its agents would see no GPU."""
    found = render({"clusterName": "prod-eu", "agent": {"pools": {"a": {}, "b": {}}}})
    agents = found.of("DaemonSet")
    assert len(agents) == 2
    assert all("--cluster=prod-eu" in agent.container["args"] for agent in agents)
    assert controller_settings(found.fairshare).cluster == "prod-eu"
    assert found.accountant.settings.kubernetes.cluster == "prod-eu"


def test_agents_may_have_a_privileged_namespace_of_their_own(render: Any) -> None:
    values = {"agent": {"namespace": {"name": "agents", "create": True}, "resourceQuota": True}}
    manifests = render(values)
    found = manifests
    labels = found.by_name["Namespace", "agents"]["metadata"]["labels"]
    assert {v for k, v in labels.items() if k.startswith("pod-security.kubernetes.io/")} == {"privileged"}
    moved = {m["kind"] for m in manifests if m["metadata"].get("namespace") == "agents"}
    assert moved == {"ConfigMap", "DaemonSet", "NetworkPolicy", "ResourceQuota", "ServiceAccount"}
    (subject,) = found.by_name["ClusterRoleBinding", "metering-gputally-agent"]["subjects"]
    assert subject["namespace"] == "agents"
    quota = found.find("ResourceQuota", "agent")["spec"]["scopeSelector"]["matchExpressions"]
    assert quota == [{"operator": "In", "scopeName": "PriorityClass", "values": ["system-node-critical"]}]
    denied = [m for m in manifests if m["metadata"]["name"] == "gputally-default-deny"]
    assert {m["metadata"]["namespace"] for m in denied} == {"metering", "agents"}
    into = found.find("NetworkPolicy", "accountant")["spec"]["ingress"]
    peers = [peer for rule in into for peer in rule["from"] if "podSelector" in peer]
    by = {peer["podSelector"]["matchLabels"][COMPONENT]: peer.get("namespaceSelector") for peer in peers}
    assert by == {"agent": {"matchLabels": {"kubernetes.io/metadata.name": "agents"}}, "fairshare": None}
    (to,) = found.find("NetworkPolicy", "agent").ways_out["http"]
    assert to["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "metering"}}


def test_the_lake_is_where_the_values_say_and_its_secrets_come_by_reference(render: Any) -> None:
    lake = {
        "warehouse": "s3://books/lake", "existingSecret": "lake-secrets", "every": "30m",
        "catalog": {
            "type": "sql", "uri": "postgresql+psycopg://gputally@db/lake",
            "properties": {"s3.endpoint": "https://store:9000", "s3.region": "eu"},
        },
    }  # fmt: skip
    found = render({"accountant": {"lake": lake}, "networkPolicy": {"lakeCidrs": ["10.1.0.0/16"], "lakePorts": [9000]}})
    workload = found.accountant
    settings = workload.settings.lake
    assert settings is not None
    assert (settings.warehouse, settings.every, settings.days_back) == ("s3://books/lake", 1800, 45)
    assert settings.catalog.uri == "postgresql+psycopg://gputally@db/lake"
    assert settings.catalog.properties == {"s3.endpoint": "https://store:9000", "s3.region": "eu"}
    assert settings.secrets == Path(workload.mounts["lake"]) / "lake.yaml"
    assert workload.volumes["lake"]["secret"] == {"secretName": "lake-secrets", "defaultMode": 0o440}
    policy = found.find("NetworkPolicy", "accountant")["spec"]["egress"]
    assert {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 9000}]} in policy
    assert render({}).accountant.settings.lake is None


def test_accountants_of_other_clusters_are_a_file_and_their_tokens_a_secret(render: Any) -> None:
    text = "clusters: {prod-us: {url: https://us.example, token_file: /etc/gputally/secrets/prod-us.token}}"
    accountants = {"text": text, "existingSecret": "other-clusters"}
    found = render({"fairshare": {"accountants": accountants}, "networkPolicy": {"fleetCidrs": ["10.30.0.0/16"]}})
    workload = found.fairshare
    assert "--accountants=/etc/gputally/accountants/accountants.yaml" in workload.container["args"]
    name = workload.volumes["accountants"]["configMap"]["name"]
    assert found.by_name["ConfigMap", name]["data"]["accountants.yaml"].strip() == text
    secret = workload.volumes["accountants-secrets"]["secret"]
    assert secret == {"secretName": "other-clusters", "defaultMode": 0o440}
    assert workload.mounts["accountants-secrets"] == "/etc/gputally/secrets"
    egress = found.find("NetworkPolicy", "fairshare")["spec"]["egress"]
    assert {"to": [{"ipBlock": {"cidr": "10.30.0.0/16"}}], "ports": [{"port": 443}]} in egress
    alone = render({}).fairshare.container
    assert not any(argument.startswith("--accountants") for argument in alone["args"])


def test_the_fleets_pages_stand_alone_and_open_the_lake_that_the_values_name(render: Any) -> None:
    found = render(FLEET)
    (workload,) = found.workloads
    assert workload["metadata"]["name"] == "gputally-fleet"
    settings = accountant_settings(
        None, workload.environment, {"listen": "0.0.0.0:8080", "tokens": "/etc/gputally/tokens/tokens.yaml"}
    )
    assert settings.lake is not None
    assert (settings.lake.warehouse, settings.lake.catalog.type) == ("s3://books/lake", "rest")
    assert settings.lake.catalog.properties == {"s3.region": "eu-1"}
    assert settings.lake.secrets == Path("/etc/gputally/lake/lake.yaml")
    assert (settings.tls_cert, settings.session_key) == (
        Path("/etc/gputally/tls/tls.crt"), Path("/etc/gputally/session/session.key"),
    )  # fmt: skip
    arguments = workload.container["args"]
    assert arguments[:2] == ["fleet", "serve"]
    assert {"--engine=trino", "--engine-url=https://trino.example", "--rates=/etc/gputally/rates/rates.yaml"} <= {
        *arguments
    }
    assert workload.pod["automountServiceAccountToken"] is False
    assert not [m for m in found if "Role" in m["kind"]]
    out = found.find("NetworkPolicy", "fleet").ways_out
    assert set(out) == {53, 443}
    (rule,) = found.find("NetworkPolicy", "fleet")["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http"}]
    assert found.find("Service", "fleet")["spec"]["ports"][0]["appProtocol"] == "https"
    assert found.find("PodDisruptionBudget", "fleet")["spec"]["maxUnavailable"] == 1
    assert found.find("Ingress", "fleet")["spec"]["rules"][0]["host"] == "fleet.example"
    assert ("Deployment", "gputally-fleet") not in render({}).by_name


def test_the_fleets_replicas_store_ended_sessions_where_the_values_say(render: Any) -> None:
    sign_in = {**FLEET["fleet"]["signIn"], "store": "s3://books/sessions"}
    (workload,) = render({**FLEET, "fleet": {**FLEET["fleet"], "signIn": sign_in}}).workloads
    settings = accountant_settings(None, workload.environment, {"tokens": "/etc/gputally/tokens/tokens.yaml"})
    assert settings.session_store == "s3://books/sessions"
    assert settings.object_storage.properties == {"s3.region": "eu-1"}, "the lake's access"
    assert settings.object_storage.secrets == Path("/etc/gputally/lake/lake.yaml")
    (plain,) = render(FLEET).workloads
    assert not [name for name in plain.environment if "SESSION_STORE" in name or "OBJECT_STORAGE" in name]


def test_the_notes_say_where_the_fleets_pages_are_and_that_they_reach_nothing(chart: helm_python.Chart) -> None:
    assert "port-forward svc/gputally-fleet 8090:8080" in notes(chart, FLEET)
    assert "WARNING: networkPolicy.lakeCidrs" not in notes(chart, FLEET)
    assert "WARNING: networkPolicy.lakeCidrs names no range" in notes(
        chart, {**FLEET, "networkPolicy": {"lakeCidrs": []}}
    )


def test_several_accountants_take_turns_by_a_lease(render: Any) -> None:
    """A waiting replica is not ready, so no Service, update or disruption budget may depend on its readiness."""
    values = {"replicas": 2, "kubernetesApi": False, "archive": {"enabled": True, "accessMode": "ReadWriteMany"}}
    secret = {"tokens": {"existingSecret": "tokens"}}
    others = {"agent": {"token": {"existingSecret": "agent"}}, "fairshare": {"token": {"existingSecret": "fairshare"}}}
    found = render({"accountant": values | secret, **others})
    workload = found.accountant
    assert workload["spec"]["replicas"] == 2
    assert workload["spec"]["updateStrategy"] == {"type": "OnDelete"}
    settings = workload.settings
    assert settings.leader_election is not None
    assert (settings.leader_election.lease, settings.leader_election.own_volume) == ("gputally-accountant", True)
    assert workload.pod["automountServiceAccountToken"]
    assert workload.container["readinessProbe"]["httpGet"]["path"] == "/leading"
    assert "publishNotReadyAddresses" not in found.find("Service", "accountant")["spec"]
    assert ("PodDisruptionBudget", "gputally-accountant") not in found.by_name
    assert found.find("PersistentVolumeClaim", "accountant-archive")["spec"]["accessModes"] == ["ReadWriteMany"]
    rules = found.find("Role", "accountant")["rules"]
    assert {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]} in rules
    assert any(
        6443 in [port["port"] for port in rule.get("ports", ())] or rule.get("to")
        for rule in found.find("NetworkPolicy", "accountant")["spec"]["egress"]
    )
    alone = render({})
    assert alone.accountant["spec"]["replicas"] == 1
    assert ("Role", "gputally-accountant") not in alone.by_name


def test_the_archive_is_a_volume_of_its_own_that_stays(render: Any) -> None:
    assert render({}).of("PersistentVolumeClaim") == []
    archive = {"enabled": True, "every": "30m", "keepRows": "90d", "size": "1Ti", "storageClassName": "nfs"}
    found = render({"accountant": {"archive": archive, "backups": {"every": "1d", "keep": 3}}})
    claim = found.find("PersistentVolumeClaim", "accountant-archive")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Ti"
    accountant = found.accountant
    settings = accountant.settings
    assert settings.archive is not None
    assert (settings.archive.to, settings.archive.every) == ("/archive/ledger", 1800)
    assert settings.archive.keep_rows == 90 * 86_400
    assert (settings.backups_to, settings.backups.every, settings.backups.keep) == ("/archive/backups", 86_400, 3)
    assert accountant.mounts["archive"] == "/archive"
    theirs = {"accountant": {"archive": {"enabled": True, "existingClaim": "tapes"}}}
    assert render(theirs).of("PersistentVolumeClaim") == []


def test_the_archive_may_be_in_an_object_store_and_needs_no_volume_then(render: Any) -> None:
    archive = {
        "enabled": True, "to": "s3://books/prod/", "existingSecret": "store",
        "properties": {"s3.endpoint": "https://store:9000", "s3.region": "eu"},
    }  # fmt: skip
    replicas = {"replicas": 2, "archive": archive}
    found = render({"accountant": replicas, "networkPolicy": {"lakeCidrs": ["10.1.0.0/16"]}})
    assert found.of("PersistentVolumeClaim") == []
    workload = found.accountant
    settings = workload.settings
    assert settings.archive is not None
    assert (settings.archive.to, settings.backups_to) == ("s3://books/prod/ledger", "s3://books/prod/backups")
    assert settings.object_storage.properties == {"s3.endpoint": "https://store:9000", "s3.region": "eu"}
    assert settings.object_storage.secrets == Path(workload.mounts["object-storage"]) / "object-storage.yaml"
    assert "archive" not in workload.mounts
    assert workload.volumes["object-storage"]["secret"] == {"secretName": "store", "defaultMode": 0o440}
    policy = found.find("NetworkPolicy", "accountant")["spec"]["egress"]
    assert {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 443}]} in policy


def test_jobs_ask_the_accountant_and_nobody_else(render: Any) -> None:
    values = {
        "backup": {"enabled": True, "keep": 3},
        "report": {"enabled": True, "formats": ["pdf", "csv", "focus-1.2"]},
    }
    found = render({**values, "timezone": "Europe/Berlin"})
    specs = dict(found.pod_specs())
    for name, scheduled in (("backup", "30 2 * * *"), ("report", "0 6 6 * *")):
        job = found.find("CronJob", f"{name}")["spec"]
        assert (job["schedule"], job["timeZone"], job["concurrencyPolicy"]) == (scheduled, "Europe/Berlin", "Forbid")
        spec = specs[name]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for one in spec["containers"]:
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert one["securityContext"]["readOnlyRootFilesystem"] is True
        policy = found.find("NetworkPolicy", f"{name}")
        assert policy["spec"]["ingress"] == []
        assert set(policy.ways_out) == {53, "http"}
    assert [(one["name"], one["args"][:3]) for one in specs["report"]["containers"]] == [
        ("report-pdf", ["report", "last", "--format=pdf"]),
        ("report-csv", ["report", "last", "--format=csv"]),
        ("report-focus-1-2", ["report", "last", "--format=focus-1.2"]),
    ]
    (backup,) = specs["backup"]["containers"]
    assert backup["args"][:3] == ["backup", "--to=/kept", "--keep=3"]


def test_the_ways_out_are_opened_by_what_needs_them(render: Any) -> None:
    dns = {"to": [{"ipBlock": {"cidr": "169.254.20.10/32"}}], "ports": [5353]}
    network = {
        "issuerCidrs": ["203.0.113.0/24"], "issuerPorts": [8443], "deliveryCidrs": ["198.51.100.7/32"], "dns": dns,
        "apiServerCidr": "10.9.8.7/32", "apiServerPorts": [6443],
    }  # fmt: skip
    prometheus = {"url": "http://prometheus.metrics.svc", "port": 9099, "to": [{"name": "metrics"}]}
    found = render({"networkPolicy": network, "fairshare": {"prometheus": prometheus}})
    assert found.find("NetworkPolicy", "accountant").ways_out == {
        6443: [{"ipBlock": {"cidr": "10.9.8.7/32"}}],
        5353: [*dns["to"], *dns["to"]],
        8443: [{"ipBlock": {"cidr": "203.0.113.0/24"}}],
        443: [{"ipBlock": {"cidr": "198.51.100.7/32"}}],
        587: [{"ipBlock": {"cidr": "198.51.100.7/32"}}],
    }
    fairshare = found.find("NetworkPolicy", "fairshare").ways_out
    assert set(fairshare) == {5353, "http", 6443, 9099}
    assert fairshare[9099] == [{"namespaceSelector": {"matchLabels": {"name": "metrics"}}}]


def test_deliveries_have_their_file_and_their_secrets(render: Any) -> None:
    text = "schema: 1\n"
    deliveries = {"text": text, "existingSecret": "webhooks"}
    found = render({"accountant": {"deliveries": deliveries, "publicUrl": "https://gputally.example"}})
    accountant = found.accountant
    assert found.find("ConfigMap", "accountant-deliveries")["data"]["deliveries.yaml"] == text
    settings = accountant.settings
    assert settings.deliveries == Path("/etc/gputally/deliveries/deliveries.yaml")
    assert settings.public_url == "https://gputally.example"
    places = accountant.mounts
    assert (places["deliveries"], places["secrets"]) == ("/etc/gputally/deliveries", "/etc/gputally/secrets")


def test_two_controllers_stand_on_two_nodes(render: Any) -> None:
    assert "podAntiAffinity" in render({}).fairshare.pod["affinity"]
    assert ("PodDisruptionBudget", "gputally-fairshare") not in render({"fairshare": {"replicas": 1}})


def test_openshift_gives_ids_and_agents_get_what_they_need(render: Any) -> None:
    def constraints(**agent: Any) -> Manifest:
        values = {"openshift": {"enabled": True}, "agent": agent, "report": {"enabled": True}}
        manifests = render(values)
        assert "'runAsUser': 65532" not in str(manifests)
        (found,) = manifests.of("SecurityContextConstraints")
        return found

    least = constraints()
    assert least["users"] == ["system:serviceaccount:metering:gputally-agent"]
    asked = ("allowHostPID", "allowPrivilegedContainer", "allowedCapabilities")
    assert [least[key] for key in asked] == [False, False, []]
    most = constraints(pools={"a": {"privilege": "process"}, "b": {"privilege": "profiling"}})
    assert [most[key] for key in asked] == [True, False, ["SYS_ADMIN"]]
    assert constraints(privileged=True)["allowPrivilegedContainer"] is True


def test_an_agent_without_gpus_plays_a_scenario_and_mounts_no_more_than_its_spool(render: Any) -> None:
    text = "gpus: [{model: H100}]\n"
    found = render({"agent": {"simulated": {"text": text}, "kubernetesApi": False}})
    agent = found.agent
    assert found.find("ConfigMap", "agent-simulated")["data"]["scenario.yaml"] == text
    assert "--simulated=/etc/gputally/simulated/scenario.yaml" in agent.container["args"]
    assert not any(argument.startswith("--kubelet-socket") for argument in agent.container["args"])
    assert [name for name, volume in agent.volumes.items() if "hostPath" in volume] == ["spool"]


def test_a_driver_without_a_runtime_is_mounted_where_the_loader_looks(render: Any) -> None:
    agent = render(FILES["presets/gke"]).agent
    (mount,) = [m for m in agent.container["volumeMounts"] if m["name"] == "driver"]
    assert agent.volumes["driver"]["hostPath"] == {"path": "/home/kubernetes/bin/nvidia", "type": "Directory"}
    assert (mount["mountPath"], mount["readOnly"]) == ("/usr/local/nvidia", True)
    assert agent.environment["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"


def test_the_programs_start_with_what_the_examples_tell_them(
    render: Any, example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = render(example)
    for workload in found.workloads:
        with contextlib.redirect_stdout(io.StringIO()), monkeypatch.context() as surroundings:
            for name, value in workload.environment.items():
                if name.startswith("GPUTALLY_"):
                    surroundings.setenv(name, value)
            assert main([*workload.container["args"], "--print-config"]) == 0
    texts = {name: text for m in found.of("ConfigMap") for name, text in m["data"].items()}
    for name, text in texts.items():
        file = tmp_path / name
        file.write_text(text, "utf-8")
        if name == "policy.yaml":
            assert main(["fairshare", "check", str(file)]) == 0
        if name == "prices.yaml":
            load_prices(file)
        if name == "callers.yaml":
            Callers.model_validate(yaml.safe_load(text))
        if name == "scenario.yaml":
            load_scenario(file, "kind-worker", 1_790_812_800_000)


def test_the_controller_may_read_the_schedulers_configmaps_that_are_named(render: Any) -> None:
    """The role never allows all ConfigMaps of the cluster, only those with these names."""
    names = ["kueue-config", "volcano-scheduler-configmap"]
    found = render({"fairshare": {"rbac": {"schedulerConfigMaps": names}}})
    role = found.by_name["ClusterRole", "metering-gputally-fairshare"]
    (rule,) = (rule for rule in role["rules"] if "configmaps" in rule["resources"])
    assert (rule["resourceNames"], rule["verbs"]) == (names, ["get"])


def test_the_controller_may_read_no_configmap_if_none_is_named(render: Any) -> None:
    """A rule without names would allow all of the cluster."""
    found = render({"fairshare": {"rbac": {"schedulerConfigMaps": []}}})
    role = found.by_name["ClusterRole", "metering-gputally-fairshare"]
    assert not [rule for rule in role["rules"] if "configmaps" in rule["resources"]]


@pytest.mark.parametrize("wanted", [True, False])
def test_another_chart_installs_this_one_on_a_condition(tmp_path: Path, wanted: bool) -> None:
    folder = chart_of_charts(tmp_path / "platform", condition="gputally.enabled")
    files = helm_python.Chart.load(folder).render({"gputally": {"enabled": wanted}}, name="p", namespace="metering")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    kinds = {manifest["kind"] for manifest in documents(texts)}
    assert ("DaemonSet" in kinds) is wanted


def test_two_releases_share_no_folder_of_a_node(chart: helm_python.Chart) -> None:
    def spool(name: str, namespace: str) -> str:
        rendered = chart.render({}, name=name, namespace=namespace)
        texts = (text for path, text in rendered.items() if path.endswith("agent.yaml"))
        (agent,) = (m for m in documents(texts) if m["kind"] == "DaemonSet")
        (volume,) = (v for v in agent["spec"]["template"]["spec"]["volumes"] if v["name"] == "spool")
        return str(volume["hostPath"]["path"])

    found = {spool(name, namespace) for name in ("gputally", "second") for namespace in ("a", "b")}
    assert len(found) == 4
    assert all(path.startswith("/var/lib/gputally/") for path in found)


@pytest.mark.parametrize("cloud", ["eks", "aks"])
def test_the_presets_of_a_cloud_and_of_the_gpu_operator_agree_in_any_order(
    folder: Path, render: Any, cloud: str
) -> None:
    both = [yaml.safe_load((folder / "presets" / f"{name}.yaml").read_text()) for name in (cloud, "gpu-operator")]

    def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        return {"agent": {**first["agent"], **second["agent"]}}

    agents = [render(merged(*order)).agent for order in (both, both[::-1])]
    assert {agent.pod["runtimeClassName"] for agent in agents} == {"nvidia"}
    assert {agent["metadata"]["namespace"] for agent in agents} == {"gputally-agents"}
