"""The three programs on a real API server, each with exactly the chart's roles, and the rights that they used.

The server's audit log names the user of each request. No request may be refused, and no right may be unused without a
reason."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.chart.conftest import Rendered, Values
from tests.chart.real.conftest import RELEASE, Recorder
from tests.deadlines import until
from tests.fakes.kubelet.server import FakeKubelet, compile_messages
from tests.real.programs import free_ports, running

pytestmark = pytest.mark.real
NODE, WORK = "gpu-0", "work"
MANY = 21
"""Number of unknown owners of one kind from which the accountant lists the kind instead of requesting each."""
Kind = tuple[str, str]
"""apiVersion and kind."""
BUILT_IN = {"", "apps", "authentication.k8s.io", "authorization.k8s.io", "batch", "coordination.k8s.io",
            "events.k8s.io", "policy", "resource.k8s.io", "scheduling.k8s.io"}  # fmt: skip
VERSIONS = {
    "scheduling.run.ai/queues": ("v2", "Queue"), "scheduling.run.ai/podgroups": ("v2alpha2", "PodGroup"),
    "kai.scheduler/schedulingshards": ("v1", "SchedulingShard"), "kai.scheduler/configs": ("v1", "Config"),
    "kueue.x-k8s.io/clusterqueues": ("v1beta2", "ClusterQueue"), "kueue.x-k8s.io/cohorts": ("v1beta2", "Cohort"),
    "kueue.x-k8s.io/resourceflavors": ("v1beta2", "ResourceFlavor"),
    "kueue.x-k8s.io/localqueues": ("v1beta2", "LocalQueue"), "kueue.x-k8s.io/workloads": ("v1beta2", "Workload"),
    "scheduling.volcano.sh/queues": ("v1beta1", "Queue"), "scheduling.volcano.sh/podgroups": ("v1beta1", "PodGroup"),
    "batch.volcano.sh/jobs": ("v1alpha1", "Job"),
}  # fmt: skip
"""Versions and kinds that the programs name; those of owners come from discovery."""
CLUSTER_WIDE = {"queues", "clusterqueues", "cohorts", "resourceflavors", "schedulingshards", "configs"}


class Right(NamedTuple):
    group: str
    resource: str
    verb: str


IDLE = {
    ("", "pods", "get"): "asked about a victim before it is stopped: tests/fairshare/real/test_preemption.py",
    ("policy", "poddisruptionbudgets", "list"): "the same",
    ("kueue.x-k8s.io", "workloads", "get"): "the same",
    ("batch.volcano.sh", "jobs", "get"): "the same",
    ("kai.scheduler", "configs", "get"): "where KAI's operator finds usage, in mode usage alone",
}
"""Rights of fairshare that this run does not use, with the tests that use them."""


def granted(manifests: Rendered, component: str) -> set[Right]:
    roles = [m for m in manifests.of("ClusterRole", "Role") if m["metadata"]["name"].endswith(f"gputally-{component}")]
    return {
        Right(group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(recorder: Recorder, user: str) -> set[Right]:
    """Return the rights that a user has used. Fails if a request was refused."""
    found: set[Right] = set()
    for entry in recorder.entries(user):
        ref = entry.get("objectRef")
        if ref is None or "resource" not in ref:
            continue  # discovery, which everybody may
        assert entry["responseStatus"].get("code") != 403, entry["requestURI"]
        resource = ref["resource"] + (f"/{ref['subresource']}" if "subresource" in ref else "")
        found.add(Right(ref.get("apiGroup", ""), resource, entry["verb"]))
        if entry["verb"] == "patch" and entry["responseStatus"].get("code") == 201:
            found.add(Right(ref.get("apiGroup", ""), resource, "create"))  # an apply that makes the object
    return found


@pytest.fixture(scope="module")
def manifests(render: Callable[[Values], Rendered]) -> Rendered:
    """The chart's manifests, with all three programs using the API server."""
    return render({"accountant": {"kubernetesApi": True}})


@pytest.fixture(scope="module")
def kinds(recorder: Recorder, manifests: Rendered) -> dict[tuple[str, str], Kind]:
    """Every kind that a role names and the server lacks: (group, plural) -> (apiVersion, kind)."""
    wanted = {
        (right.group, right.resource) for name in ("accountant", "fairshare") for right in granted(manifests, name)
    }
    made: dict[tuple[str, str], Kind] = {}
    for group, plural in sorted(wanted):
        if group not in BUILT_IN:
            version, kind = VERSIONS.get(f"{group}/{plural}", ("v1", plural.capitalize()))
            made[group, plural] = (f"{group}/{version}", kind)
    for (group, plural), (api_version, kind) in made.items():
        version = api_version.rpartition("/")[2]
        recorder.server.define(group, version, plural, kind, namespaced=plural not in CLUSTER_WIDE)
    for (_, plural), (api_version, _) in made.items():
        until(
            lambda path=f"/apis/{api_version}", plural=plural: recorder.server.serves(path, plural),
            lambda name=f"{plural} of {api_version}": f"{name} are not served",
        )
    return made


@pytest.fixture(scope="module")
def accounts(recorder: Recorder, manifests: Rendered, tmp_path_factory: Any) -> dict[str, tuple[str, Path]]:
    """The chart's accounts and roles: component -> (its user, a file with its token)."""
    for manifest in manifests.of("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
        recorder.apply(manifest, dry_run=False)
    found = {}
    for component in ("agent", "accountant", "fairshare"):
        file = tmp_path_factory.mktemp(component) / "token"
        file.write_text(recorder.server.token(RELEASE, f"gputally-{component}"))
        found[component] = (f"system:serviceaccount:{RELEASE}:gputally-{component}", file)
    return found


@pytest.fixture(scope="module")
def owners(recorder: Recorder, kinds: dict[tuple[str, str], Kind]) -> list[Kind]:
    """A cluster with a node, queues, and GPU pods with owners of every kind; returns these kinds."""
    for space in (WORK, "kueue-system", "volcano-system"):
        recorder.make_namespace(space)
    recorder.send("POST", "/api/v1/nodes", {"metadata": {"name": NODE, "labels": {"nvidia.com/gpu.product": "H100"}}})
    # One that is not ready is down, and its time is no capacity to weigh by.
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    recorder.send("PATCH", f"/api/v1/nodes/{NODE}/status", ready, "application/merge-patch+json")
    # Nor does one that no controller has untainted take pods.
    recorder.send("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": []}}, "application/merge-patch+json")
    queue = {"resources": {"gpu": {"quota": 4, "overQuotaWeight": 1}}}
    # Two LocalQueues of one ClusterQueue: one alone has the weight that an unset field means, and needs no write.
    meta = {"name": "robots", "namespace": WORK}
    local = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": meta}
    recorder.apply({**local, "spec": {"clusterQueue": "vision"}}, dry_run=False)
    for name in ("vision", "language"):
        for api_version, kind, spec in (
            ("scheduling.run.ai/v2", "Queue", queue),
            ("kueue.x-k8s.io/v1beta2", "ClusterQueue", {"cohortName": "all"}),
            ("kueue.x-k8s.io/v1beta2", "Cohort", {}),
            ("scheduling.volcano.sh/v1beta1", "Queue", {"weight": 1}),
        ):
            meta = {"name": name}
            recorder.apply({"apiVersion": api_version, "kind": kind, "metadata": meta, "spec": spec}, dry_run=False)
        meta = {"name": name, "namespace": WORK}
        local = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": meta}
        recorder.apply({**local, "spec": {"clusterQueue": name}}, dry_run=False)
    found = {("batch/v1", "Job"), ("batch/v1", "CronJob")}
    found |= {("apps/v1", kind) for kind in ("ReplicaSet", "Deployment", "StatefulSet", "DaemonSet")}
    found |= {kind for (_, plural), kind in kinds.items() if plural not in CLUSTER_WIDE | {"localqueues"}}
    work(recorder, sorted(found), range(MANY))
    return sorted(found)


def work(recorder: Recorder, owners: Sequence[Kind], numbers: Iterable[int]) -> None:
    """Create GPU pods, one for each number and kind of owner."""
    pods = [
        {
            "metadata": {
                "name": f"{kind.lower()}-{hashlib.sha256(version.encode()).hexdigest()[:6]}-{number}",
                "ownerReferences": [
                    {"apiVersion": version, "kind": kind, "name": f"o-{number}", "uid": f"{version}-{kind}-{number}",
                     "controller": True}
                ],
            },
            "spec": {
                "nodeName": NODE,
                "schedulerName": "kai-scheduler",  # GPUs that pods of another hold are not KAI's to divide
                "containers": [{"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
            },
        }
        for version, kind in owners
        for number in numbers
    ]  # fmt: skip
    with ThreadPoolExecutor(8) as several:
        list(several.map(lambda pod: recorder.send("POST", f"/api/v1/namespaces/{WORK}/pods", pod), pods))


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "gputally", *map(str, words)]


@contextlib.contextmanager
def program(folder: Path, name: str, words: list[str], **environment: str) -> Iterator[Path]:
    """Run a program as a process. Yields its log."""
    log = folder / f"{name}.log"
    with running(words, log, {**os.environ, **environment}) as process:
        yield log
        assert process.poll() is None, log.read_text("utf-8")[-3000:]


def test_the_programs_use_every_right_they_are_given_and_ask_for_no_other(
    recorder: Recorder,
    accounts: dict[str, tuple[str, Path]],
    manifests: Rendered,
    owners: list[Kind],
    tmp_path: Path,
) -> None:
    server = recorder.server
    port, metering, watching, controller = free_ports(4)
    url = f"http://127.0.0.1:{port}"
    token = tmp_path / "all.token"
    token.write_text("everything")
    digest = hashlib.sha256(b"everything").hexdigest()
    scopes = "admin"
    (tmp_path / "tokens.yaml").write_text(f"tokens:\n  - {{name: all, token_sha256: {digest}, scopes: [{scopes}]}}\n")
    callers = {"schema": 1, "kubernetes": {"audience": "https://localhost", "agents": [], "rights": True}}
    (tmp_path / "callers.yaml").write_text(yaml.safe_dump(callers))
    place = "{gpu: 0, namespace: work, pod: train, utilisation_ppm: 900000, memory_mib: 1000, queue_ref: 'kai:vision'}"
    scenario = f"gpus: [{{model: H100}}, {{model: H100}}]\nevents:\n  - {{after_ms: 0, place: {place}}}\n"
    (tmp_path / "scenario.yaml").write_text(scenario)
    targets = {name: {"apply": "enforce"} for name in ("kai", "kueue", "volcano")}
    queues = [
        {"name": name, "deserved": 1, "team": name, "refs": [f"{s}:{name}" for s in ("kai", "kueue", "volcano")]}
        for name in ("vision", "language")
    ]
    queues += [
        {"name": "vision-local", "parent": "vision", "weight": 3, "refs": [f"kueue:{WORK}/vision"]},
        {"name": "robots", "parent": "vision", "refs": [f"kueue:{WORK}/robots"]},
        {"name": "department", "refs": ["kueue-cohort:vision"]},
        {"name": "batch", "refs": ["policy:batch"]},  # its gangs are PodGroups, if the server has them
    ]
    policy = {"schema": 1, "targets": targets, "queues": queues, "preemption": {"mode": "dry-run"}}
    policy["min_coverage"] = 0.01  # a machine under load misses readings
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))

    kubeconfig = server.kubeconfig_for(accounts["accountant"][1].read_text(), tmp_path)
    with contextlib.ExitStack() as stack:
        serve = command(
            "accountant", "serve", f"--data={tmp_path / 'data'}", f"--listen=127.0.0.1:{port}",
            f"--tokens={tmp_path / 'tokens.yaml'}", f"--callers={tmp_path / 'callers.yaml'}",
        )  # fmt: skip
        settings = {"INVENTORY": "true", "KUBECONFIG": str(kubeconfig)}
        environment = {f"GPUTALLY_ACCOUNTANT_KUBERNETES__{key}": value for key, value in settings.items()}
        environment["GPUTALLY_ACCOUNTANT_REFRESH_SECONDS"] = "1s"
        logs = {"accountant": stack.enter_context(program(tmp_path, "accountant", serve, **environment))}
        until(lambda: answers(f"{url}/livez"), lambda: logs["accountant"].read_text()[-3000:])
        common = ["--interval=1", "--sample=0.5", "--ship=1", "--node=gpu-0"]
        deliver = [f"--url={url}", f"--token-file={token}", f"--spool={tmp_path / 'spool-a'}", f"--port={metering}"]
        simulate = command("agent", "run", f"--simulated={tmp_path / 'scenario.yaml'}", *common, *deliver)
        logs["meter"] = stack.enter_context(program(tmp_path, "meter", simulate))
        asks = [f"--api-url={server.url}", f"--api-ca-file={server.ca_file}"]
        asks += [f"--api-token-file={accounts['agent'][1]}", f"--spool={tmp_path / 'spool-b'}", f"--port={watching}"]
        kubelet = [f"--kubelet-socket={tmp_path / 'kubelet.sock'}"]
        fake = FakeKubelet(compile_messages(tmp_path), tmp_path / "kubelet.sock")
        fake.give(WORK, "watching", {"main": {}}, {"main": [("all", "gpu-0")]})
        stack.enter_context(fake.running())
        logs["agent"] = stack.enter_context(
            program(tmp_path, "agent", command("agent", "run", *common, *asks, *kubelet))
        )
        run = command(
            "fairshare", "run", f"--policy={tmp_path / 'policy.yaml'}", f"--url={url}", f"--token-file={token}",
            f"--kubeconfig={server.kubeconfig_for(accounts['fairshare'][1].read_text(), tmp_path)}", "--interval=2s",
            f"--listen=127.0.0.1:{controller}",
        )  # fmt: skip
        names = {"STATUS_NAMESPACE": RELEASE, "STATUS_NAME": "gputally-fairshare", "LEASE": "gputally-fairshare"}
        environment = {f"GPUTALLY_FAIRSHARE_{key}": value for key, value in names.items()}
        logs["fairshare"] = stack.enter_context(program(tmp_path, "fairshare", run, **environment))
        person = accounts["fairshare"][1].read_text()  # reviewed as a person: no agent of the callers file
        until(lambda: answers(f"{url}/v1/usage", person) is not None, lambda: "nobody is reviewed")

        def wait_for(component: str, wanted: set[Right]) -> None:
            user = accounts[component][0]
            until(
                lambda: wanted <= used(recorder, user),
                lambda: (
                    f"{component} makes no use of {sorted(wanted - used(recorder, user))}\n"
                    f"{logs[component].read_text()[-4000:]}"
                ),
            )

        rights = {component: granted(manifests, component) for component in accounts}
        assert set(IDLE) <= rights["fairshare"]
        # Many owners of a kind are listed, and those of whom the list says nothing are gone; a few are asked for.
        wait_for("accountant", {right for right in rights["accountant"] if right.verb == "list"})
        work(recorder, owners, [MANY])
        for component, (user, _) in accounts.items():
            wait_for(component, rights[component] - (set(IDLE) if component == "fairshare" else set()))
            assert used(recorder, user) <= rights[component]


def answers(url: str, token: str = "") -> int | None:
    """Return the status of an answer, or None without one."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
