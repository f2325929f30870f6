"""Checks which RBAC rights each program has and needs.

The rights are those of the chart's roles (a test compares them). Rights on kinds that the server does not serve are not
needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from accountant.wire.policy_models import Policy
from gputally.base.errors import ClusterError
from gputally.doctor.check_inputs import ClusterView
from gputally.doctor.findings import CheckResult, Finding, joined_names
from gputally.kubernetes.objects import Kind

PROGRAMS = ("agent", "accountant", "fairshare")
OWN = "gputally-fairshare"
"""The controller's account, ConfigMap and Lease, as in a release with the name gputally."""


@dataclass(frozen=True, slots=True)
class AccessRight:
    """A right that a program needs.

    resource: the resource, with its subresource if there is one (`pods/eviction`).
    name: name of a single object, "" for all objects.
    local: whether the right is needed only in the release's own namespace."""

    group: str
    resource: str
    verb: str
    name: str = ""
    local: bool = False

    def __str__(self) -> str:
        group = f".{self.group}" if self.group else ""
        return f"{self.verb} {self.resource}{group}" + (f" {self.name}" if self.name else "")


def _every(
    groups: str, resources: str, verbs: str, names: Iterable[str] = ("",), *, local: bool = False
) -> Iterator[AccessRight]:
    for group in groups.split():
        for resource in resources.split():
            for verb in verbs.split():
                for name in names:
                    yield AccessRight("" if group == "core" else group, resource, verb, name, local)


_AGENT = (
    *_every("core", "pods nodes", "list watch"),
    *_every("resource.k8s.io", "resourceslices", "list watch"),
    *_every("resource.k8s.io", "resourceclaims", "get"),
)
OWNERS = (
    *_every("batch", "jobs cronjobs", "get list"),
    *_every("apps", "replicasets deployments statefulsets daemonsets", "get list"),
    *_every("jobset.x-k8s.io", "jobsets", "get list"),
    *_every("leaderworkerset.x-k8s.io", "leaderworkersets", "get list"),
    *_every(
        "kubeflow.org trainer.kubeflow.org",
        "tfjobs pytorchjobs mpijobs xgboostjobs paddlejobs jaxjobs trainjobs notebooks",
        "get list",
    ),
    *_every("ray.io", "rayclusters rayjobs rayservices", "get list"),
    *_every("batch.volcano.sh", "jobs", "get list"),
    *_every("argoproj.io", "workflows cronworkflows", "get list"),
    *_every("tekton.dev", "taskruns pipelineruns", "get list"),
    *_every("serving.kserve.io", "inferenceservices", "get list"),
    *_every("serving.knative.dev", "revisions configurations services", "get list"),
    *_every("sparkoperator.k8s.io", "sparkapplications scheduledsparkapplications", "get list"),
)
"""Kinds whose objects own pods. Without the right to read one of them, the name of a job ends below it."""
_ACCOUNTANT = (
    *_every("core", "pods namespaces nodes", "list watch"),
    *OWNERS,
    *_every("kueue.x-k8s.io", "localqueues clusterqueues cohorts", "list watch"),
    *_every("kueue.x-k8s.io", "workloads", "get list watch"),
    *_every("scheduling.run.ai scheduling.volcano.sh", "podgroups", "get list watch"),
    *_every("authentication.k8s.io", "tokenreviews", "create"),
    *_every("authorization.k8s.io", "subjectaccessreviews", "create"),
)
SCHEDULER_CONFIGS = ("kueue-manager-config", "volcano-scheduler-configmap")
"""Names of the schedulers' own ConfigMaps, if the policy gives no others."""
_FAIRSHARE = (
    *_every("scheduling.run.ai scheduling.volcano.sh", "queues", "list patch"),
    *_every("kueue.x-k8s.io", "clusterqueues cohorts localqueues", "list patch"),
    *_every("scheduling.run.ai scheduling.volcano.sh", "podgroups", "list"),
    *_every("kueue.x-k8s.io", "workloads", "get list"),
    *_every("batch.volcano.sh", "jobs", "get list"),
    *_every("core", "pods", "get list watch"),
    *_every("policy", "poddisruptionbudgets", "list"),
    *_every("kai.scheduler", "schedulingshards", "list"),
    *_every("kai.scheduler", "configs", "get", ("kai-config",)),
    *_every("scheduling.k8s.io", "priorityclasses", "list"),
    *_every("core", "configmaps", "get", SCHEDULER_CONFIGS),
    *_every("core", "nodes", "list"),
    *_every("events.k8s.io", "events", "create list"),
    *_every("core", "configmaps", "get patch", (OWN, f"{OWN}-runai"), local=True),
    *_every("coordination.k8s.io", "leases", "get update", (OWN,), local=True),
    *_every("core", "configmaps", "create", local=True),
    *_every("coordination.k8s.io", "leases", "create", local=True),
)
PREEMPTING = (
    *_every("core", "pods", "patch"),
    *_every("core", "pods/eviction", "create"),
    *_every("kueue.x-k8s.io", "workloads", "patch"),
    *_every("batch.volcano.sh", "jobs", "patch"),
    *_every("bus.volcano.sh", "commands", "create list"),
)
"""Additional rights of the controller if the policy enforces preemption."""
NEEDS: Mapping[str, tuple[AccessRight, ...]] = {"agent": _AGENT, "accountant": _ACCOUNTANT, "fairshare": _FAIRSHARE}


def scheduler_configs(policy: Policy) -> tuple[str, ...]:
    """Return the names of the ConfigMaps with the configuration of the policy's schedulers."""
    prefixes = {ref.partition(":")[0] for queue in policy.queues for ref in queue.refs}
    targets = policy.targets
    found = [targets.kueue.config] if prefixes & {"kueue", "kueue-cohort"} else []
    found += [targets.volcano.config] if "volcano" in prefixes else []
    return tuple(config.partition("/")[2] for config in found)


def needed_rights(
    program: str, served: Collection[tuple[str, str]], *, preempts: bool = False, configs: Collection[str] = ()
) -> tuple[AccessRight, ...]:
    """Return the rights that the program needs.

    served: kinds, as (group, resource).
    preempts: the policy in force stops running work.
    configs: ConfigMaps of schedulers that it names."""
    wanted = NEEDS[program]
    if program == "fairshare":
        others = [name for name in configs if name not in SCHEDULER_CONFIGS]
        wanted += (*_every("core", "configmaps", "get", others), *(PREEMPTING if preempts else ()))
    return tuple(right for right in wanted if (right.group, right.resource.partition("/")[0]) in served)


def judge_rights(answers: Mapping[str, Mapping[AccessRight, bool]], users: Mapping[str, str]) -> CheckResult:
    """Report missing rights.

    answers: by program, the rights it has.
    users: by program, the user that was checked."""
    findings = [each for program in answers for each in _of_program(program, answers[program], users[program])]
    asked = sum(len(rights) for rights in answers.values())
    names = joined_names(dict.fromkeys(users[program] for program in answers))
    return CheckResult(f"{asked} rights of {', '.join(answers)}, asked for {names}", tuple(findings))


def _of_program(program: str, answers: Mapping[AccessRight, bool], user: str) -> Iterator[Finding]:
    owners = frozenset(OWNERS) if program == "accountant" else frozenset[AccessRight]()
    refused = [right for right, allowed in answers.items() if not allowed]
    hard, soft = [r for r in refused if r not in owners], [r for r in refused if r in owners]
    create = f"helm upgrade gputally … --set {program}.rbac.create=true"
    if hard:
        text = f"{program} is not allowed what it has to do: {joined_names(map(str, hard))}"
        yield Finding("error", text, f"{len(hard)} of {len(answers)} rights refused to {user}", create)
    if soft:
        text = f"{program} may not read kinds that own pods: their jobs stay without a name"
        yield Finding("warning", text, f"{joined_names(map(str, soft))}; asked for {user}", create)


SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts", namespaced=True, status=False)
_NAME, _COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
_OTHERS = {"group": "authorization.k8s.io", "resource": "subjectaccessreviews", "verb": "create"}


def ask(
    ground: ClusterView, namespace: str, *, preempts: bool = False, configs: Collection[str] = ()
) -> tuple[dict[str, dict[AccessRight, bool]], dict[str, str]]:
    """Return the rights of each program, and the users that were checked.

    namespace: the namespace of the release, if no account states it.
    configs: ConfigMaps of schedulers that the policy names."""
    served = ground.served({right.group for rights in (*NEEDS.values(), PREEMPTING) for right in rights})
    accounts = _accounts(ground)
    answers: dict[str, dict[AccessRight, bool]] = {}
    users: dict[str, str] = {}
    if not accounts:
        caller = ground.caller() or "this caller"
        accounts = dict.fromkeys(PROGRAMS, ("", namespace))
        users = dict.fromkeys(PROGRAMS, caller)
    for program, (user, home) in accounts.items():
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{home}", "system:authenticated") if user else ()
        answers[program] = {
            right: ground.may(_attributes(right, home, user.rpartition(":")[2]), user, groups)
            for right in needed_rights(program, served, preempts=preempts, configs=configs)
        }
        users.setdefault(program, user)
    return answers, users


def _accounts(ground: ClusterView) -> dict[str, tuple[str, str]]:
    """Return (user, namespace) by program from the labels of the chart; empty if the accounts may not be listed or
    checked."""
    found: dict[str, tuple[str, str]] = {}
    try:
        if not ground.may(_OTHERS):
            return {}
        for obj in ground.list(SERVICE_ACCOUNT):
            labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
            program = labels.get(_COMPONENT, "")
            if labels.get(_NAME) == "gputally" and program in PROGRAMS:
                home = obj["metadata"].get("namespace", "")
                found[program] = (f"system:serviceaccount:{home}:{obj['metadata']['name']}", home)
    except ClusterError:
        return {}
    return {program: found[program] for program in PROGRAMS if program in found}


def _attributes(right: AccessRight, namespace: str, account: str) -> dict[str, str]:
    """Return the attributes of an access review. account: the controller's own objects have its name."""
    resource, _, subresource = right.resource.partition("/")
    name = right.name.replace(OWN, account) if right.local and account else right.name
    return {
        "group": right.group,
        "resource": resource,
        "verb": right.verb,
        **({"subresource": subresource} if subresource else {}),
        **({"name": name} if name else {}),
        **({"namespace": namespace} if right.local else {}),
    }
