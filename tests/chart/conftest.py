"""Renders the chart with Helm."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from accountant.core.settings import Settings, load

CHART = Path(__file__).parents[2] / "helm" / "gputally"
Values = dict[str, Any]
COMPONENT = "app.kubernetes.io/component"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
JOBS: Values = {"backup": {"enabled": True}, "report": {"enabled": True}}

OF_A_POD: Values = {
    "podLabels": {"example.org/cost": "platform"},
    "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
    "priorityClassName": "high",
    "extraArgs": ["--log-level=debug"],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
    "extraVolumes": [{"name": "proxy-ca", "configMap": {"name": "proxy-ca"}}],
    "extraVolumeMounts": [{"name": "proxy-ca", "mountPath": "/etc/proxy-ca", "readOnly": True}],
    "podSecurityContext": {"supplementalGroups": [4000]},
    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
}
"""Values that every component accepts for its pod."""
SPREAD: Values = {
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ]
}

VARIATIONS: dict[str, Values] = {
    "defaults": {},
    "everything": {
        "clusterName": "prod-eu",
        "timezone": "Europe/Berlin",
        "commonLabels": {"team": "platform"},
        "imagePullSecrets": [{"name": "pull"}],
        "image": {"registry": "images.example/gpu/", "pullPolicy": "Always"},
        "agent": {
            "privilege": "profiling",
            "accountingMode": True,
            "image": {"digest": "sha256:" + "0" * 64},
            "affinity": {"nodeAffinity": {}},
            "podAnnotations": {"note": "agent"},
            "podLabels": {"example.org/billed": "no"},
            "extraEnv": [{"name": "GPUTALLY_AGENT_LOG_LEVEL", "value": "debug"}],
            "updateStrategy": {"type": "OnDelete"},
            "namespace": {"name": "gpu-agents", "create": True},
            "resourceQuota": True,
            "seLinuxType": "spc_t",
            "driverHostPath": "/home/kubernetes/bin/nvidia",
        },
        "accountant": {
            "prices": {"text": "schema: 1\ncurrency: EUR\nrows: []\n"},
            "inventory": {"existingConfigMap": "nodes"},
            "callers": {"text": "schema: 1\nkubernetes: {agents: [metering/gputally-agent]}\n"},
            "kubernetesApi": True,
            "teamLabels": ["team", "example.org/team"],
            "persistence": {"storageClassName": "fast", "annotations": {"keep": "yes"}},
            "archive": {"enabled": True, "existingClaim": "archive", "keepRows": "90d"},
            "backups": {"every": "1d", "keep": 3},
            "tls": {"existingSecret": "accountant-tls", "clientCertificates": True},
            "authority": {"existingConfigMap": "authorities", "key": "bundle.pem"},
            "publicUrl": "https://gpus.example",
            "signIn": {
                "session": "30m",
                "existingSecret": "login",
                "sessionKey": {"existingSecret": "session", "key": "cookie.key"},
            },
            "podDisruptionBudget": {"maxUnavailable": 0},
            "service": {"annotations": {"note": "service"}},
            "kaiUsage": {"enabled": True, "from": [{"kubernetes.io/metadata.name": "kai-scheduler"}]},
            "opencost": {"enabled": True, "port": 9004, "from": [{"kubernetes.io/metadata.name": "finops"}]},
            "priorityClassName": "high",
            "nodeSelector": {"role": "infra"},
            "tolerations": [{"key": "infra", "operator": "Exists", "effect": "NoSchedule"}],
        },
        "fairshare": {
            "policy": {"existingConfigMap": "policy"},
            "token": {"existingSecret": "t", "key": "k"},
            "replicas": 3,
            "podDisruptionBudget": {"enabled": False},
            "prometheus": {"url": "http://prometheus.monitoring.svc:9090", "token": {"existingSecret": "prometheus"}},
            "extender": {"enabled": True, "from": ["10.0.0.0/24"], "tls": {"existingSecret": "extender-tls"}},
            "pages": {
                "enabled": True,
                "from": [{"kubernetes.io/metadata.name": "ingress"}],
                "tls": {"existingSecret": "pages-tls"},
                "apply": True,
                "accountantUrl": "https://gpus.example/",
                "publicUrl": "https://fairshare.example",
                "callers": {"text": "schema: 1\nissuers: []\n"},
                "signIn": {
                    "session": "1h",
                    "existingSecret": "pages-login",
                    "sessionKey": {"existingSecret": "pages-session", "key": "cookie.key"},
                },
            },
        },
        "networkPolicy": {
            "accountantFrom": [{"kubernetes.io/metadata.name": "ingress"}],
            "issuerCidrs": ["203.0.113.0/24"],
            "issuerPorts": [443, 8443],
        },
        "openshift": {"enabled": True},
    },
    "jobs": {
        "backup": {"enabled": True, "persistence": {"existingClaim": "tapes"}, "token": {"existingSecret": "admin"}},
        "report": {"enabled": True, "formats": ["pdf"], "schedule": "@monthly", "nodeSelector": {"role": "infra"}},
        "accountant": {"archive": {"enabled": True}},
    },
    "the fleet's pages alone": {
        "agent": {"enabled": False},
        "accountant": {
            "enabled": False,
            "lake": {
                "warehouse": "s3://books/lake",
                "catalog": {"type": "rest", "uri": "https://catalog.example", "properties": {"s3.region": "eu-1"}},
                "existingSecret": "lake",
            },
        },
        "fairshare": {"enabled": False},
        "dashboards": {"enabled": False},
        "fleet": {
            "enabled": True,
            "replicas": 3,
            "engine": "trino",
            "engineUrl": "https://trino.example",
            "rates": {"text": "to: USD\nrates: {EUR: 1.08}\n"},
            "callers": {"text": "schema: 1\nissuers: []\n"},
            "tokens": {"existingSecret": "tokens"},
            "publicUrl": "https://fleet.example",
            "signIn": {"existingSecret": "login", "sessionKey": {"existingSecret": "session"}},
            "tls": {"existingSecret": "fleet-tls"},
            "from": [{"kubernetes.io/metadata.name": "ingress"}],
            "ingress": {"enabled": True},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
            **OF_A_POD,
            **SPREAD,
        },
        "networkPolicy": {"lakeCidrs": ["10.20.0.0/16"]},
    },
    "agents only": {
        "agent": {
            "privilege": "process",
            "kubernetesApi": False,
            "releaseFile": "",
            "runtimeClassName": "",
            "nodeSelector": {},
        },
        "accountant": {"enabled": False, "externalUrl": "https://accountant.example"},
        "fairshare": {"enabled": False},
        "dashboards": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
    "as a cluster admin wants it": {
        "namespaceOverride": "metering",
        "global": {"imageRegistry": "mirror.example", "imagePullSecrets": ["mirror"], "theirs": {"x": 1}},
        "commonLabels": {"app.kubernetes.io/part-of": "platform"},
        "agent": {"dnsPolicy": "ClusterFirstWithHostNet", **OF_A_POD},
        "accountant": {
            "publicUrl": "https://gpus.example:8443/",
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "tls": [{"secretName": "web", "hosts": ["gpus.example"]}],
            },
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "web", "namespace": "gateways"}]},
            "tokens": {"existingSecret": "people"},
            **SPREAD,
            **OF_A_POD,
        },
        "fairshare": {
            "pages": {"enabled": True, "ingress": {"enabled": True, "hosts": ["fairshare.example"]}},
            **SPREAD,
            **OF_A_POD,
        },
        "backup": {"enabled": True, "podAnnotations": {"note": "job"}, **OF_A_POD},
        "report": {"enabled": True, "podAnnotations": {"note": "job"}, **OF_A_POD},
        "networkPolicy": {"accountantFrom": [{"kubernetes.io/metadata.name": "ingress"}]},
    },
    "pools": {
        "agent": {
            "pools": {
                "big": {"privilege": "profiling", "nodeSelector": {"pool": "big"}},
                "desks": {"runtimeClassName": "", "privileged": True, "simulated": {"text": "gpus: []\n"}},
            }
        }
    },
    "certificates": {
        "agent": {"token": {"existingSecret": "one-node"}},
        "accountant": {
            "tls": {"certManager": {"issuerRef": {"name": "internal"}}, "clientCertificates": True},
            "authority": {"existingConfigMap": "authorities"},
        },
    },
    "plain HTTP": {
        "accountant": {"kubernetesApi": False, "tls": {"enabled": False}, "tokens": {"existingSecret": "tokens"}},
        "agent": {"token": {"existingSecret": "one-node"}, "runAsUser": 65532, "runAsGroup": 0},
        "fairshare": {"token": {"existingSecret": "controller"}},
    },
    "no agents": {
        "fullnameOverride": "books",
        "agent": {"enabled": False},
        "fairshare": {"rbac": {"create": False}, "serviceAccount": {"create": False, "name": "mine"}},
        "monitoring": {"namespaceSelector": {"matchExpressions": [{"key": "prometheus", "operator": "Exists"}]}},
    },
}
FLEET = VARIATIONS["the fleet's pages alone"]
FILES: dict[str, Values] = {
    f"{folder}/{path.stem}": yaml.safe_load(path.read_text("utf-8"))
    for folder in ("examples", "presets")
    for path in sorted((CHART / folder).glob("*.yaml"))
}
EVERY: dict[str, Values] = {**VARIATIONS, **FILES}


class Manifest(dict[str, Any]):
    """A rendered object. Properties such as `pod` and `container` are for workloads with one container."""

    @property
    def pod(self) -> dict[str, Any]:
        found: dict[str, Any] = self["spec"]["template"]["spec"]
        return found

    @property
    def container(self) -> dict[str, Any]:
        (found,) = self.pod["containers"]
        assert isinstance(found, dict)
        return found

    @property
    def environment(self) -> dict[str, str]:
        return {e["name"]: e["value"] for e in self.container["env"] if "value" in e}

    @property
    def mounts(self) -> dict[str, str]:
        """The mount path of each volume in the container."""
        return {m["name"]: m["mountPath"] for m in self.container["volumeMounts"]}

    @property
    def volumes(self) -> dict[str, Any]:
        return {volume["name"]: volume for volume in self.pod["volumes"]}

    @property
    def settings(self) -> Settings:
        """The settings that the accountant reads from its environment."""
        told = {key: value for key, value in self.environment.items() if key.startswith("GPUTALLY_")}
        return load(None, told, {"auth": "off"})

    @property
    def ways_out(self) -> dict[int | str, list[Any]]:
        """The allowed destinations of a network policy by port."""
        found: dict[int | str, list[Any]] = {}
        for rule in self["spec"]["egress"]:
            for port in rule["ports"]:
                found.setdefault(port["port"], []).extend(rule["to"])
        return found


class Rendered(list[Manifest]):
    """The result of one rendering, in the order of Helm's files."""

    @property
    def by_name(self) -> dict[tuple[str, str], Manifest]:
        """The manifests by kind and name."""
        return {(m["kind"], m["metadata"]["name"]): m for m in self}

    def find(self, kind: str, name: str) -> Manifest:
        """Return one manifest. name: without the prefix of the release."""
        return self.by_name[kind, f"gputally-{name}"]

    def of(self, *kinds: str) -> list[Manifest]:
        return [manifest for manifest in self if manifest["kind"] in kinds]

    @property
    def workloads(self) -> list[Manifest]:
        return self.of("DaemonSet", "StatefulSet", "Deployment")

    @property
    def agent(self) -> Manifest:
        return self.find("DaemonSet", "agent")

    @property
    def accountant(self) -> Manifest:
        return self.find("StatefulSet", "accountant")

    @property
    def fairshare(self) -> Manifest:
        return self.find("Deployment", "fairshare")

    def pods(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return component and pod template of every workload and job."""
        for manifest in self:
            spec = manifest.get("spec", {})
            spec = spec.get("jobTemplate", {}).get("spec", spec)
            if "template" in spec:
                yield manifest["metadata"]["labels"][COMPONENT], spec["template"]

    def pod_specs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((component, template["spec"]) for component, template in self.pods())


def at(manifest: Manifest, path: str) -> Any:
    """Return the value at a path such as `spec.ports.0.port`, or None if there is none."""
    found: Any = manifest
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else (found or {}).get(key)
    return found


def files_of(chart: helm_python.Chart, values: Values) -> dict[str, str]:
    found: dict[str, str] = chart.render(values, name="gputally", namespace="metering")
    return found


def notes(chart: helm_python.Chart, values: Values) -> str:
    """Return Helm's notes after an installation."""
    return files_of(chart, values)["gputally/templates/NOTES.txt"]


def refused(chart: helm_python.Chart, values: Values) -> str:
    """Return the reason for which the templates refuse these values."""
    with pytest.raises(helm_python.HelmRenderError) as caught:
        files_of(chart, values)
    return str(caught.value)


def rendered_by(chart: helm_python.Chart, values: Values) -> Rendered:
    files = sorted(files_of(chart, values).items())
    return Rendered(
        Manifest(manifest) for manifest in documents(text for path, text in files if path.endswith(".yaml"))
    )


def documents(texts: Iterable[str]) -> list[Any]:
    """Parse YAML, without the empty documents, with the loader in C: dashboards are large, and are often rendered."""
    return [one for text in texts for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def chart_of_charts(folder: Path, **more: str) -> Path:
    """Write a platform's chart to `folder` that has this chart as a dependency. more: further fields of the
    dependency."""
    shutil.copytree(CHART, folder / "charts" / "gputally")
    dependency = {"name": "gputally", "version": "0.1.0", "repository": "", **more}
    description = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(description), "utf-8")
    return folder


@pytest.fixture(scope="session")
def folder() -> Path:
    return CHART


@pytest.fixture(scope="session")
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


@pytest.fixture(scope="session")
def render(chart: helm_python.Chart) -> Callable[[Values], Rendered]:
    """Return a function that renders the chart with values. Equal values are rendered once; each caller gets a copy."""
    known: dict[str, bytes] = {}

    def rendered(values: Values) -> Rendered:
        key = json.dumps(values, sort_keys=True)
        if key not in known:
            known[key] = pickle.dumps(rendered_by(chart, values))
        found: Rendered = pickle.loads(known[key])
        return found

    return rendered


@pytest.fixture(scope="session", params=sorted(EVERY))
def values(request: pytest.FixtureRequest) -> Values:
    return EVERY[request.param]


@pytest.fixture(scope="session", params=sorted(FILES))
def example(request: pytest.FixtureRequest) -> Values:
    """A values file that the chart contains."""
    return FILES[request.param]


@pytest.fixture
def manifests(render: Callable[[Values], Rendered], values: Values) -> Rendered:
    return render(values)


@pytest.fixture
def workloads(manifests: Rendered) -> dict[str, Manifest]:
    """Return the DaemonSet, StatefulSet or Deployment of each component (for an agent, of each component and pool)."""
    found = {}
    for workload in manifests.workloads:
        labels = workload["metadata"]["labels"]
        found["/".join(filter(None, (labels.get(COMPONENT), labels.get("gputally.dev/pool"))))] = workload
    return found
