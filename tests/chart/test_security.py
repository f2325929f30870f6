"""Least privilege, in every variation: what no pod may have, and what each has to have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.conftest import (
    ACCOUNTANT,
    AGENT,
    COMPONENT,
    PROBES,
    WORKLOADS,
    Manifest,
    agent_of,
    container,
    environment,
    made,
    mounts,
    named,
    pod,
    settings_of,
    volumes,
    ways_out,
)

RESTRICTED = {"accountant", "fairshare"}
OF_THE_ACCOUNTANT = {"gputally-accountant", "gputally-kai-usage", "gputally-opencost"}
"""Its Service and network policy, and those of its ports without credentials."""
OF_THE_OPERATOR = {"secrets", "login", "lake"}
"""Secrets whose keys the operator names."""


def test_every_container_is_bounded_probed_and_read_only(workloads: dict[str, dict[str, Any]]) -> None:
    for workload in workloads.values():
        found = container(workload)
        assert set(found["resources"]["requests"]) == {"cpu", "memory"}
        assert "memory" in found["resources"]["limits"]
        ports = {port["name"] for port in found["ports"]}
        assert {found[probe]["httpGet"]["port"] for probe in PROBES} <= ports
        assert found["securityContext"]["readOnlyRootFilesystem"] is True


def test_accountant_and_fairshare_pass_the_restricted_standard(workloads: dict[str, dict[str, Any]]) -> None:
    """Source: kubernetes.io, Pod Security Standards, profile Restricted."""
    for component in RESTRICTED & set(workloads):
        spec, context = pod(workloads[component]), container(workloads[component])["securityContext"]
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
        assert all("hostPort" not in port for port in container(workloads[component])["ports"])


@pytest.mark.parametrize(
    ("level", "host_pid", "added", "monitors_mig"),
    [("allocation", False, None, False), ("process", True, None, False), ("profiling", True, ["SYS_ADMIN"], True)],
)
def test_the_agent_has_what_its_level_needs_and_no_more(
    render: Any, level: str, host_pid: bool, added: list[str] | None, monitors_mig: bool
) -> None:
    agent = agent_of(render, privilege=level)
    context = container(agent)["securityContext"]
    assert pod(agent)["hostPID"] is host_pid
    assert context["privileged"] is False
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["capabilities"].get("add") == added
    assert ("NVIDIA_MIG_MONITOR_DEVICES" in {e["name"] for e in container(agent)["env"]}) is monitors_mig


def test_the_agent_is_privileged_only_where_it_is_asked_for(
    render: Any, values: dict[str, Any], workloads: dict[str, dict[str, Any]]
) -> None:
    given = values.get("agent", {})
    for name, workload in workloads.items():
        pool = given.get("pools", {}).get(name.partition("/")[2], {})
        asked_for = name.startswith("agent") and {**given, **pool}.get("privileged", False)
        assert container(workload)["securityContext"].get("privileged", False) is asked_for
    assert container(agent_of(render, privileged=True))["securityContext"]["privileged"] is True


def test_the_agent_takes_nothing_else_of_the_host(workloads: dict[str, dict[str, Any]]) -> None:
    if "agent" in workloads:
        spec = pod(workloads["agent"])
        assert not spec.get("hostNetwork", False)
        assert not spec.get("hostIPC", False)
        assert "nvidia.com/gpu" not in str(container(workloads["agent"])["resources"])


@pytest.mark.parametrize("level", ["allocation", "process", "profiling"])
def test_of_the_host_the_agent_sees_its_spool_the_kubelets_socket_and_with_hostpid_the_log_folders(
    render: Any, level: str
) -> None:
    agent = agent_of(render, privilege=level)
    names = pod(agent)["hostPID"]
    paths = [v["hostPath"]["path"] for v in pod(agent)["volumes"] if "hostPath" in v]
    kubelet = "/var/lib/kubelet/pod-resources"
    assert paths == ["/var/lib/gputally", *(["/var/log/pods"] if names else []), kubelet]
    (socket,) = (m for m in container(agent)["volumeMounts"] if m["name"] == "pod-resources")
    assert socket == {"name": "pod-resources", "mountPath": kubelet, "readOnly": True}
    logs = [m for m in container(agent)["volumeMounts"] if m["name"] == "pod-logs"]
    assert logs == ([{"name": "pod-logs", "mountPath": "/var/log/pods", "readOnly": True}] if names else [])
    assert ("--pod-logs=/var/log/pods" in container(agent)["args"]) is names


def test_log_folders_elsewhere_on_the_node_are_mounted_where_the_agent_looks(render: Any) -> None:
    agent = agent_of(render, privilege="process", podLogsHostPath="/data/pods")
    assert volumes(agent)["pod-logs"]["hostPath"] == {"path": "/data/pods", "type": "Directory"}
    assert "--pod-logs=/var/log/pods" in container(agent)["args"]


@pytest.mark.parametrize(("name", "flags"), [("mig", ["--release-file=/var/lib/gputally/mig"]), ("", [])])
def test_the_release_file_lies_beside_the_spool(render: Any, name: str, flags: list[str]) -> None:
    agent = agent_of(render, releaseFile=name)
    assert [arg for arg in container(agent)["args"] if arg.startswith("--release-file")] == flags
    assert mounts(agent)["spool"] == "/var/lib/gputally"


def test_the_agent_has_time_to_deliver_the_rest(render: Any) -> None:
    agent = agent_of(render, graceSeconds=45)
    assert "--grace=45" in container(agent)["args"]
    assert pod(agent)["terminationGracePeriodSeconds"] > 45


def test_the_agent_reads_pods_and_nodes_and_nothing_else(render: Any) -> None:
    found = named(render({}))
    role = found["ClusterRole", "metering-gputally-agent"]
    assert [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in role["rules"]] == [
        ([""], ["pods"], ["list", "watch"]),
        (["resource.k8s.io"], ["resourceslices"], ["list", "watch"]),
        (["resource.k8s.io"], ["resourceclaims"], ["get"]),
        ([""], ["nodes"], ["list", "watch"]),
    ]
    access = volumes(found[AGENT])["kube-api-access"]["projected"]
    assert access["defaultMode"] == 0o400
    assert access["sources"][0]["serviceAccountToken"] == {"path": "token", "expirationSeconds": 3607}
    assert "audience" not in access["sources"][0]["serviceAccountToken"]


def test_without_the_api_server_the_agent_has_no_right_no_token_and_no_way_there(render: Any) -> None:
    found = named(render({"agent": {"kubernetesApi": False}}))
    assert not any(kind.startswith("ClusterRole") and name.endswith("-agent") for kind, name in found)
    assert "kube-api-access" not in str(pod(found[AGENT]))
    assert "--api-url=off" in container(found[AGENT])["args"]
    assert set(ways_out(found["NetworkPolicy", "gputally-agent"])) == {53, "http"}


@pytest.mark.parametrize("asked", [True, False])
def test_accounting_mode_is_asked_for_on_its_own(render: Any, asked: bool) -> None:
    values = {"agent": {"privilege": "process", "accountingMode": asked}, "openshift": {"enabled": True}}
    manifests = render(values)
    agent = container(named(manifests)[AGENT])
    assert ("--accounting" in agent["args"]) is asked
    added = agent["securityContext"]["capabilities"].get("add", [])
    assert added == (["SYS_ADMIN"] if asked else []), "what the driver's kernel module wants for it"
    (constraints,) = made(manifests, "SecurityContextConstraints")
    assert constraints["allowedCapabilities"] == added


def test_the_agent_is_told_its_level_and_what_may_leave_the_node(render: Any) -> None:
    labels, sharing = ["team", "example.org/*"], ["kai", "hami"]
    agent = agent_of(render, privilege="process", exportPodLabels=labels, gpuSharing=sharing)
    arguments = container(agent)["args"]
    assert {"--privilege=process", "--pod-labels=team,example.org/*", "--gpu-sharing=kai,hami"} <= set(arguments)
    assert "--standalone" not in arguments


def test_the_accountant_only_looks_at_the_api_server_and_only_if_it_is_told_to(render: Any) -> None:
    blind = {"accountant": {"kubernetesApi": False, "tokens": {"existingSecret": "t"}}}
    blind |= {name: {"token": {"existingSecret": "t"}} for name in ("agent", "fairshare")}
    without = named(render(blind))
    assert not any(kind == "ClusterRole" and name.endswith("-accountant") for kind, name in without)
    assert pod(without[ACCOUNTANT])["automountServiceAccountToken"] is False
    assert without["NetworkPolicy", "gputally-accountant"]["spec"]["egress"] == []
    asked = {"kubernetesApi": True, "teamLabels": ["team", "x/y"], "userLabels": ["owner"]}
    found = named(render({"accountant": asked}))
    reviews = {"tokenreviews", "subjectaccessreviews"}
    for rule in found["ClusterRole", "metering-gputally-accountant"]["rules"]:
        assert set(rule["verbs"]) <= ({"create"} if set(rule["resources"]) <= reviews else {"get", "list", "watch"})
    accountant = found[ACCOUNTANT]
    assert pod(accountant)["automountServiceAccountToken"] is True
    told = environment(accountant)
    assert told["GPUTALLY_ACCOUNTANT_KUBERNETES__INVENTORY"] == "true"
    assert told["GPUTALLY_ACCOUNTANT_KUBERNETES__TEAM_LABELS"] == "team,x/y"
    settings = settings_of(accountant)
    assert settings.kubernetes.team_labels == ("team", "x/y")
    assert settings.kubernetes.user_labels == ("owner",)
    policy = found["NetworkPolicy", "gputally-accountant"]["spec"]
    assert {p["port"] for rule in policy["egress"] for p in rule["ports"]} == {443, 6443}


def test_only_accountant_and_fairshare_get_the_usual_token_of_the_api_server(
    render: Any, manifests: list[dict[str, Any]]
) -> None:
    for workload in made(render({}), *WORKLOADS):
        component = workload["metadata"]["labels"][COMPONENT]
        assert pod(workload)["automountServiceAccountToken"] is (component in RESTRICTED)
        assert pod(workload)["enableServiceLinks"] is False
    for account in made(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_roles_name_every_verb_and_resource(manifests: list[dict[str, Any]]) -> None:
    for role in made(manifests, "ClusterRole", "Role"):
        for rule in role["rules"]:
            for part in ("apiGroups", "resources", "verbs"):
                assert "*" not in rule[part]
            assert "secrets" not in rule["resources"]
            assert not {"delete", "deletecollection", "escalate", "bind", "impersonate"} & set(rule["verbs"])


def test_no_secret_is_rendered_but_the_accountants_own_certificate(
    manifests: list[dict[str, Any]], workloads: dict[str, dict[str, Any]]
) -> None:
    secrets = made(manifests, "Secret")
    assert [m["type"] for m in secrets] in ([], ["kubernetes.io/tls"])
    for secret in secrets:
        assert set(secret["data"]) == {"ca.crt", "tls.crt", "tls.key"}, "the authority's key is not kept"
    for workload in workloads.values():
        for volume in pod(workload)["volumes"]:
            if "secret" in volume and volume["name"] not in OF_THE_OPERATOR:
                assert {frozenset(item) for item in volume["secret"]["items"]} == {frozenset({"key", "path"})}
                assert volume["secret"]["defaultMode"] in {0o400, 0o440}


def test_traffic_is_denied_unless_a_policy_needs_it(render: Any) -> None:
    manifests = render({})
    policies = {m["metadata"]["name"]: m["spec"] for m in made(manifests, "NetworkPolicy")}
    deny = policies["gputally-default-deny"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    assert "egress" not in deny
    for workload in made(manifests, *WORKLOADS):
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
        """Environment, ports of the Service, and who may connect to the port."""
        manifests = render({"accountant": {value: values}})
        accountant = named(manifests)[ACCOUNTANT]
        pods = accountant["spec"]["selector"]["matchLabels"]

        def own(kind: str) -> list[Manifest]:
            return [m for m in made(manifests, kind) if m["metadata"]["name"] in OF_THE_ACCOUNTANT]

        assert all(m["spec"]["selector"] == pods for m in own("Service"))
        service = [p for m in own("Service") for p in m["spec"]["ports"]]
        assert {p["name"] for p in container(accountant)["ports"]} == {p["targetPort"] for p in service}
        assert all(m["spec"]["podSelector"]["matchLabels"] == pods for m in own("NetworkPolicy"))
        rules = [rule for m in own("NetworkPolicy") for rule in m["spec"]["ingress"]]
        admitted = {p["port"]: rule["from"] for rule in rules for p in rule["ports"]}
        return environment(accountant), {p["name"]: p["port"] for p in service}, admitted

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
        return made(render({"agent": {"smoke": smoke, "privilege": "profiling"}}), "Pod")

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
