"""Least privilege in every variation: what no pod may have, and what each has to have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.conftest import COMPONENT, PROBES, Manifest, Rendered
from tests.plugin_cases import registered

RESTRICTED = {"accountant", "fairshare"}
OF_THE_ACCOUNTANT = {"gputally-accountant", "gputally-kai-usage", "gputally-opencost"}
"""Names of the accountant's Service, and of the Services and policies of its ports without credentials."""
OF_THE_OPERATOR = {"secrets", "login", "lake"}
"""Volumes of Secrets whose keys the operator chooses."""


def test_every_container_is_bounded_probed_and_read_only(workloads: dict[str, Manifest]) -> None:
    for workload in workloads.values():
        found = workload.container
        assert set(found["resources"]["requests"]) == {"cpu", "memory"}
        assert "memory" in found["resources"]["limits"]
        ports = {port["name"] for port in found["ports"]}
        assert {found[probe]["httpGet"]["port"] for probe in PROBES} <= ports
        assert found["securityContext"]["readOnlyRootFilesystem"] is True


def test_accountant_and_fairshare_pass_the_restricted_standard(workloads: dict[str, Manifest]) -> None:
    """Source: kubernetes.io, Pod Security Standards, profile Restricted."""
    for component in RESTRICTED & set(workloads):
        spec, context = workloads[component].pod, workloads[component].container["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        if "runAsUser" in spec["securityContext"]:  # OpenShift gives one
            assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(spec)
        allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected", "downwardAPI"}
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= allowed
        assert all("hostPort" not in port for port in workloads[component].container["ports"])


@pytest.mark.parametrize(
    ("level", "host_pid", "added", "monitors_mig"),
    [("allocation", False, None, False), ("process", True, None, False), ("profiling", True, ["SYS_ADMIN"], True)],
)
def test_the_agent_has_what_its_level_needs_and_no_more(
    render: Any, level: str, host_pid: bool, added: list[str] | None, monitors_mig: bool
) -> None:
    agent = render({"agent": {"privilege": level}}).agent
    context = agent.container["securityContext"]
    assert agent.pod["hostPID"] is host_pid
    assert context["privileged"] is False
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["capabilities"].get("add") == added
    assert ("NVIDIA_MIG_MONITOR_DEVICES" in {e["name"] for e in agent.container["env"]}) is monitors_mig


def test_the_agent_is_privileged_only_where_it_is_asked_for(
    render: Any, values: dict[str, Any], workloads: dict[str, Manifest]
) -> None:
    given = values.get("agent", {})
    for name, workload in workloads.items():
        pool = given.get("pools", {}).get(name.partition("/")[2], {})
        asked_for = name.startswith("agent") and {**given, **pool}.get("privileged", False)
        assert workload.container["securityContext"].get("privileged", False) is asked_for
    assert render({"agent": {"privileged": True}}).agent.container["securityContext"]["privileged"] is True


def test_the_agent_takes_nothing_else_of_the_host(workloads: dict[str, Manifest]) -> None:
    if "agent" in workloads:
        spec = workloads["agent"].pod
        assert not spec.get("hostNetwork", False)
        assert not spec.get("hostIPC", False)
        assert "nvidia.com/gpu" not in str(workloads["agent"].container["resources"])


@pytest.mark.parametrize("level", ["allocation", "process", "profiling"])
def test_of_the_host_the_agent_sees_its_spool_the_kubelets_socket_and_with_hostpid_the_log_folders(
    render: Any, level: str
) -> None:
    agent = render({"agent": {"privilege": level}}).agent
    names = agent.pod["hostPID"]
    paths = [v["hostPath"]["path"] for v in agent.pod["volumes"] if "hostPath" in v]
    kubelet = "/var/lib/kubelet/pod-resources"
    assert paths == ["/var/lib/gputally/metering.gputally", *(["/var/log/pods"] if names else []), kubelet]
    (socket,) = (m for m in agent.container["volumeMounts"] if m["name"] == "pod-resources")
    assert socket == {"name": "pod-resources", "mountPath": kubelet, "readOnly": True}
    logs = [m for m in agent.container["volumeMounts"] if m["name"] == "pod-logs"]
    assert logs == ([{"name": "pod-logs", "mountPath": "/var/log/pods", "readOnly": True}] if names else [])
    assert ("--pod-logs=/var/log/pods" in agent.container["args"]) is names


def test_log_folders_elsewhere_on_the_node_are_mounted_where_the_agent_looks(render: Any) -> None:
    agent = render({"agent": {"privilege": "process", "podLogsHostPath": "/data/pods"}}).agent
    assert agent.volumes["pod-logs"]["hostPath"] == {"path": "/data/pods", "type": "Directory"}
    assert "--pod-logs=/var/log/pods" in agent.container["args"]


@pytest.mark.parametrize(("name", "flags"), [("mig", ["--release-file=/var/lib/gputally/mig"]), ("", [])])
def test_the_release_file_lies_beside_the_spool(render: Any, name: str, flags: list[str]) -> None:
    agent = render({"agent": {"releaseFile": name}}).agent
    assert [arg for arg in agent.container["args"] if arg.startswith("--release-file")] == flags
    assert agent.mounts["spool"] == "/var/lib/gputally"


def test_the_agent_has_time_to_deliver_the_rest(render: Any) -> None:
    agent = render({"agent": {"graceSeconds": 45}}).agent
    assert "--grace=45" in agent.container["args"]
    assert agent.pod["terminationGracePeriodSeconds"] > 45


def test_the_agent_reads_pods_and_nodes_and_nothing_else(render: Any) -> None:
    found = render({})
    role = found.by_name.get(("ClusterRole", "metering-gputally-agent"), {})
    of_kubelet = [
        ([""], ["pods"], ["list", "watch"]),
        (["resource.k8s.io"], ["resourceslices"], ["list", "watch"]),
        (["resource.k8s.io"], ["resourceclaims"], ["get"]),
        ([""], ["nodes"], ["list", "watch"]),
    ]
    rules = [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in role.get("rules") or ()]
    assert rules == (of_kubelet if registered("holders.kubelet") else [])
    access = found.agent.volumes["kube-api-access"]["projected"]
    assert access["defaultMode"] == 0o400
    assert access["sources"][0]["serviceAccountToken"] == {"path": "token", "expirationSeconds": 3607}
    assert "audience" not in access["sources"][0]["serviceAccountToken"]


def test_without_the_api_server_the_agent_has_no_right_no_token_and_no_way_there(render: Any) -> None:
    found = render({"agent": {"kubernetesApi": False}})
    assert not any(kind.startswith("ClusterRole") and name.endswith("-agent") for kind, name in found.by_name)
    assert "kube-api-access" not in str(found.agent.pod)
    assert "--api-url=off" in found.agent.container["args"]
    assert set(found.find("NetworkPolicy", "agent").ways_out) == {53, "http"}


@pytest.mark.parametrize("asked", [True, False])
def test_accounting_mode_is_asked_for_on_its_own(render: Any, asked: bool) -> None:
    values = {"agent": {"privilege": "process", "accountingMode": asked}, "openshift": {"enabled": True}}
    manifests = render(values)
    agent = manifests.agent.container
    assert ("--accounting" in agent["args"]) is asked
    added = agent["securityContext"]["capabilities"].get("add", [])
    assert added == (["SYS_ADMIN"] if asked else []), "what the driver's kernel module wants for it"
    (constraints,) = manifests.of("SecurityContextConstraints")
    assert constraints["allowedCapabilities"] == added


def test_the_agent_is_told_its_level_and_what_may_leave_the_node(render: Any) -> None:
    labels, sharing = ["team", "example.org/*"], ["kai", "hami"]
    agent = render({"agent": {"privilege": "process", "exportPodLabels": labels, "gpuSharing": sharing}}).agent
    arguments = agent.container["args"]
    assert {"--privilege=process", "--pod-labels=team,example.org/*", "--gpu-sharing=kai,hami"} <= set(arguments)
    assert "--standalone" not in arguments


def test_the_accountant_only_looks_at_the_api_server_and_only_if_it_is_told_to(render: Any) -> None:
    blind = {"accountant": {"kubernetesApi": False, "tokens": {"existingSecret": "t"}}}
    blind |= {name: {"token": {"existingSecret": "t"}} for name in ("agent", "fairshare")}
    without = render(blind)
    assert not any(kind == "ClusterRole" and name.endswith("-accountant") for kind, name in without.by_name)
    assert without.accountant.pod["automountServiceAccountToken"] is False
    assert without.find("NetworkPolicy", "accountant")["spec"]["egress"] == []
    asked = {"kubernetesApi": True, "teamLabels": ["team", "x/y"], "userLabels": ["owner"]}
    found = render({"accountant": asked})
    reviews = {"tokenreviews", "subjectaccessreviews"}
    for rule in found.by_name["ClusterRole", "metering-gputally-accountant"]["rules"]:
        assert set(rule["verbs"]) <= ({"create"} if set(rule["resources"]) <= reviews else {"get", "list", "watch"})
    accountant = found.accountant
    assert accountant.pod["automountServiceAccountToken"] is True
    told = accountant.environment
    assert told["GPUTALLY_ACCOUNTANT_KUBERNETES__INVENTORY"] == "true"
    assert told["GPUTALLY_ACCOUNTANT_KUBERNETES__TEAM_LABELS"] == "team,x/y"
    settings = accountant.settings
    assert settings.kubernetes.team_labels == ("team", "x/y")
    assert settings.kubernetes.user_labels == ("owner",)
    policy = found.find("NetworkPolicy", "accountant")["spec"]
    assert {p["port"] for rule in policy["egress"] for p in rule["ports"]} == {443, 6443}


def test_only_accountant_and_fairshare_get_the_usual_token_of_the_api_server(render: Any, manifests: Rendered) -> None:
    for workload in render({}).workloads:
        component = workload["metadata"]["labels"][COMPONENT]
        assert workload.pod["automountServiceAccountToken"] is (component in RESTRICTED)
        assert workload.pod["enableServiceLinks"] is False
    for account in manifests.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_roles_name_every_verb_and_resource(manifests: Rendered) -> None:
    for role in manifests.of("ClusterRole", "Role"):
        for rule in role["rules"]:
            for part in ("apiGroups", "resources", "verbs"):
                assert "*" not in rule[part]
            assert "secrets" not in rule["resources"]
            assert not {"delete", "deletecollection", "escalate", "bind", "impersonate"} & set(rule["verbs"])


def test_no_secret_is_rendered_but_the_accountants_own_certificate(
    manifests: Rendered, workloads: dict[str, Manifest]
) -> None:
    secrets = manifests.of("Secret")
    assert [m["type"] for m in secrets] in ([], ["kubernetes.io/tls"])
    for secret in secrets:
        assert set(secret["data"]) == {"ca.crt", "tls.crt", "tls.key"}, "the authority's key is not kept"
    for workload in workloads.values():
        for volume in workload.pod["volumes"]:
            if "secret" in volume and volume["name"] not in OF_THE_OPERATOR:
                assert {frozenset(item) for item in volume["secret"]["items"]} == {frozenset({"key", "path"})}
                assert volume["secret"]["defaultMode"] in {0o400, 0o440}


def test_traffic_is_denied_unless_a_policy_needs_it(render: Any) -> None:
    manifests = render({})
    policies = {m["metadata"]["name"]: m["spec"] for m in manifests.of("NetworkPolicy")}
    deny = policies["gputally-default-deny"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    assert "egress" not in deny
    for workload in manifests.workloads:
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert deny["podSelector"]["matchLabels"].items() <= labels.items()
    assert {p["port"] for rule in policies["gputally-accountant"]["egress"] for p in rule["ports"]} == {443, 6443}
    ports = {p["port"] for rule in policies["gputally-agent"]["egress"] for p in rule["ports"]}
    assert ports == {53, "http", 443, 6443}
    assert {} not in policies["gputally-fairshare"]["egress"]


@pytest.mark.parametrize(
    ("value", "port", "number", "setting"),
    [("kaiUsage", "kai-usage", 9091, "KAI_USAGE"), ("opencost", "opencost", 9003, "OPENCOST")],
)
def test_ports_without_credentials_are_off_and_open_to_nobody_who_is_not_named(
    render: Any, value: str, port: str, number: int, setting: str
) -> None:
    variable = f"GPUTALLY_ACCOUNTANT_{setting}__LISTEN"

    def rendered(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int], dict[str, Any]]:
        """Return the environment, the Service's ports, and the peers that may connect to the port."""
        manifests = render({"accountant": {value: values}})
        accountant = manifests.accountant
        pods = accountant["spec"]["selector"]["matchLabels"]

        def own(kind: str) -> list[Manifest]:
            return [m for m in manifests.of(kind) if m["metadata"]["name"] in OF_THE_ACCOUNTANT]

        assert all(m["spec"]["selector"] == pods for m in own("Service"))
        service = [p for m in own("Service") for p in m["spec"]["ports"]]
        assert {p["name"] for p in accountant.container["ports"]} == {p["targetPort"] for p in service}
        assert all(m["spec"]["podSelector"]["matchLabels"] == pods for m in own("NetworkPolicy"))
        rules = [rule for m in own("NetworkPolicy") for rule in m["spec"]["ingress"]]
        admitted = {p["port"]: rule["from"] for rule in rules for p in rule["ports"]}
        return accountant.environment, {p["name"]: p["port"] for p in service}, admitted

    told, service, admitted = rendered({})
    assert variable not in told
    assert port not in {**service, **admitted}
    told, service, admitted = rendered({"enabled": True})
    assert (told[variable], service[port]) == (f"0.0.0.0:{number}", number)
    assert port not in admitted
    namespace = {"kubernetes.io/metadata.name": "theirs"}
    assert rendered({"enabled": True, "from": [namespace]})[2][port] == [
        {"namespaceSelector": {"matchLabels": namespace}}
    ]


def test_the_smoke_test_takes_one_gpu_and_no_privilege(render: Any) -> None:
    def found(**smoke: Any) -> list[dict[str, Any]]:
        return render({"agent": {"smoke": smoke, "privilege": "profiling"}}).of("Pod")

    (manifest,) = found(memory="1GiB")
    spec = manifest["spec"]
    (smoke,) = spec["containers"]
    assert manifest["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert smoke["args"] == ["agent", "smoke", "--memory=1GiB", "--busy=10s"]
    assert smoke["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert smoke["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostPID", "hostIPC", "hostNetwork", "volumes"} & set(spec)
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    assert found(enabled=False) == []
