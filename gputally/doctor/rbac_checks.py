"""Checks whether each program has the RBAC rights that it needs.

`needs`, `preempting` and `EXTENDING` are the rights that the chart's roles grant; a test compares them with the roles.
Those that the accountant and manifests of plug-ins state are in the roles from there too. No program needs a right on a
kind that the API server does not serve."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from accountant.inventory.rights import RIGHTS
from accountant.wire.policy_models import Policy
from agent.holders import protocol as holders
from fairshare.core.scheduler_queue_objects import has_ref
from fairshare.targets.installed import adapters
from gputally.base.errors import ClusterError
from gputally.base.near_names import joined_names
from gputally.base.plugins import OURS, plugins
from gputally.doctor.check_inputs import ClusterView
from gputally.doctor.findings import CheckResult, Finding
from gputally.kubernetes.objects import Kind
from gputally.kubernetes.rights import Rights
from gputally.kubernetes.scheduler_plugins import SEAM, SchedulerPlugin, schedulers

PROGRAMS = ("agent", "accountant", "fairshare")
OWN = "gputally-fairshare"
"""Name of the controller's service account, ConfigMap and Lease, in a release with the name gputally."""


@dataclass(frozen=True, slots=True)
class AccessRight:
    """A right that a program needs.

    resource: the resource, with its subresource if it has one (`pods/eviction`).
    name: the name of one object; "" for all objects.
    local: True if the right is for the release's own namespace only."""

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
    """Yield the rights for every combination of the words in groups, resources and verbs, and of the names."""
    for group in groups.split():
        for resource in resources.split():
            for verb in verbs.split():
                for name in names:
                    yield AccessRight("" if group == "core" else group, resource, verb, name, local)


_FAIRSHARE = (
    *_every("core", "pods", "get list watch"),
    *_every("policy", "poddisruptionbudgets", "list"),
    *_every("scheduling.k8s.io", "podgroups priorityclasses", "list"),
    *_every("core", "nodes", "list"),
    *_every("resource.k8s.io", "resourceslices", "list"),
    *_every("events.k8s.io", "events", "create"),
    *_every("coordination.k8s.io", "leases", "get patch", (OWN,), local=True),
    *_every("core", "configmaps", "create", local=True),
    *_every("coordination.k8s.io", "leases", "create", local=True),
)
_PREEMPTING = (*_every("core", "pods", "patch"), *_every("core", "pods/eviction", "create"))
EXTENDING = (*_every("resource.k8s.io", "resourceclaims resourceclaimtemplates deviceclasses", "list watch"),)
"""Further rights that the controller needs if the kube-scheduler calls its extender."""


def _stated(
    program: str, *, preempting: bool | None = None, foreign: bool | None = None
) -> Iterator[tuple[Rights, AccessRight]]:
    """Yield the rights that the accountant and the manifests of holders and schedulers state for a program.

    preempting: those that only a policy that stops workloads needs, or the others; None: all.
    foreign: those of other packages, which the chart does not know; None: all."""
    of_holders = ((one.package, one.manifest) for one in plugins(holders.SEAM, holders.HolderPlugin))
    of_schedulers = ((one.package, one.manifest) for one in plugins(SEAM, SchedulerPlugin))
    named = ((package, one.rights) for package, one in (*of_holders, *of_schedulers) if one is not None)
    for package, several in ((OURS, RIGHTS), *named):
        for one in several if foreign in (None, package != OURS) else ():
            if one.program == program and preempting in (None, one.preempting):
                yield from (
                    (one, right) for right in _every(one.group or "core", one.resources, one.verbs, (one.name,))
                )


def needs(program: str) -> tuple[AccessRight, ...]:
    """Return the rights that the program needs whatever the policy says."""
    found = dict.fromkeys(right for _, right in _stated(program, preempting=False))
    if program != "fairshare":
        return tuple(found)
    notes = (OWN, *(f"{OWN}-{name}" for name, one in schedulers().items() if one.notes), f"{OWN}-sessions")
    return (*_FAIRSHARE, *_every("core", "configmaps", "get patch", notes, local=True), *found)


def owners() -> frozenset[AccessRight]:
    """Return the rights to read the kinds whose objects own pods. Without the right for a kind, the accountant names a
    job after an owner that is nearer to the pod."""
    found: dict[AccessRight, bool] = {}
    for stated, right in _stated("accountant"):
        found[right] = found.get(right, True) and stated.owners
    return frozenset(right for right, only in found.items() if only)


def preempting() -> tuple[AccessRight, ...]:
    """Return the further rights that the controller needs if the policy enforces preemption."""
    return (*_PREEMPTING, *(right for _, right in _stated("fairshare", preempting=True)))


def named_rights(policy: Policy) -> tuple[AccessRight, ...]:
    """Return the rights for the objects that the sections of the policy's schedulers name, such as the ConfigMap with a
    scheduler's configuration."""
    prefixes = {ref.partition(":")[0] for queue in policy.queues for ref in queue.refs}
    found: list[AccessRight] = []
    for plugin in schedulers().values():
        for one in plugin.rights if prefixes & set(plugin.prefixes) else ():
            named = getattr(policy.targets.of(plugin.section), one.setting, "") if one.setting else ""
            name = named.rpartition("/")[2] if isinstance(named, str) else ""
            if name and name != one.name:
                found += _every(one.group or "core", one.resources, one.verbs, (name,))
    return tuple(found)


def extends(policy: Policy) -> bool:
    """Return whether shares of the policy take effect through the kube-scheduler's extender."""
    asking = [each for each in adapters() if each.extender and each.mode(policy) != "off"]
    return any(has_ref(policy, *each.prefixes) for each in asking)


def needed_rights(
    program: str,
    served: Collection[tuple[str, str]],
    *,
    preempts: bool = False,
    extender: bool = False,
    named: Collection[AccessRight] = (),
) -> tuple[AccessRight, ...]:
    """Return the rights that the program needs.

    served: the kinds that the API server serves, as (group, resource).
    preempts: True if the policy in force preempts running work.
    extender: True if its shares take effect through the extender.
    named: rights for objects that the policy names (`named_rights`)."""
    needed = needs(program)
    if program == "fairshare":
        needed += (*named, *(preempting() if preempts else ()))
        needed += EXTENDING if extender else ()
    return tuple(right for right in needed if (right.group, right.resource.partition("/")[0]) in served)


def judge_rights(answers: Mapping[str, Mapping[AccessRight, bool]], users: Mapping[str, str]) -> CheckResult:
    """Report the rights that programs lack.

    answers: for each program, its needed rights, with True for a right that it has.
    users: for each program, the user whose rights were reviewed."""
    findings = [each for program in answers for each in _of_program(program, answers[program], users[program])]
    reviewed = sum(len(rights) for rights in answers.values())
    names = joined_names(dict.fromkeys(users[program] for program in answers))
    return CheckResult(f"{reviewed} rights of {', '.join(answers)}, reviewed for {names}", tuple(findings), reviewed)


def _of_program(program: str, answers: Mapping[AccessRight, bool], user: str) -> Iterator[Finding]:
    of_owners = owners() if program == "accountant" else frozenset[AccessRight]()
    missing = [right for right, allowed in answers.items() if not allowed]
    foreign = frozenset(right for _, right in _stated(program, foreign=True))
    required = [right for right in missing if right not in of_owners | foreign]
    optional = [right for right in missing if right in of_owners]
    remedy = f"helm upgrade gputally … --set {program}.rbac.create=true"
    if required:
        text = f"{program} lacks rights that it needs: {joined_names(map(str, required))}"
        yield Finding("error", text, f"{user} lacks {len(required)} of {len(answers)} rights", remedy)
    if of_others := [right for right in missing if right in foreign]:
        text = f"{program} lacks rights that a plug-in of another package needs: {joined_names(map(str, of_others))}"
        yield Finding("error", text, user, "kubectl create clusterrole and clusterrolebinding, as its page says")
    if optional:
        text = f"{program} may not read kinds that own pods: it cannot name the jobs of these kinds"
        yield Finding("warning", text, f"{user} lacks {joined_names(map(str, optional))}", remedy)


SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts", namespaced=True, status=False)
_NAME, _COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
_REVIEW_OF_OTHERS = {"group": "authorization.k8s.io", "resource": "subjectaccessreviews", "verb": "create"}


def review_rights(
    cluster: ClusterView,
    namespace: str,
    *,
    preempts: bool = False,
    extender: bool = False,
    named: Collection[AccessRight] = (),
) -> tuple[dict[str, dict[AccessRight, bool]], dict[str, str]]:
    """Review the needed rights of each program. Return the arguments `answers` and `users` of `judge_rights`.

    The users are the programs' service accounts. If the caller may not list the accounts or review their rights, its
    own rights are reviewed.

    namespace: the namespace of the release, for the review of the caller's own rights.
    preempts, extender, named: see `needed_rights`."""
    served = cluster.served(
        {right.group for rights in (*map(needs, PROGRAMS), preempting(), EXTENDING) for right in rights}
    )
    accounts = _accounts(cluster)
    answers: dict[str, dict[AccessRight, bool]] = {}
    users: dict[str, str] = {}
    if not accounts:
        caller = cluster.caller() or "this caller"
        accounts = dict.fromkeys(PROGRAMS, ("", namespace))
        users = dict.fromkeys(PROGRAMS, caller)
    for program, (user, home) in accounts.items():
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{home}", "system:authenticated") if user else ()
        answers[program] = {
            right: cluster.may(_attributes(right, home, user.rpartition(":")[2]), user, groups)
            for right in needed_rights(program, served, preempts=preempts, extender=extender, named=named)
        }
        users.setdefault(program, user)
    return answers, users


def _accounts(cluster: ClusterView) -> dict[str, tuple[str, str]]:
    """Return each program's service account as (user, namespace), by the labels that the chart sets; empty if the
    caller may not list the accounts or review their rights."""
    accounts: dict[str, tuple[str, str]] = {}
    try:
        if not cluster.may(_REVIEW_OF_OTHERS):
            return {}
        for obj in cluster.list(SERVICE_ACCOUNT):
            labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
            program = labels.get(_COMPONENT, "")
            if labels.get(_NAME) == "gputally" and program in PROGRAMS:
                home = obj["metadata"].get("namespace", "")
                accounts[program] = (f"system:serviceaccount:{home}:{obj['metadata']['name']}", home)
    except ClusterError:
        return {}
    return {program: accounts[program] for program in PROGRAMS if program in accounts}


def _attributes(right: AccessRight, namespace: str, account: str) -> dict[str, str]:
    """Return the resourceAttributes of an access review. account: the name of the service account, which the
    controller's own objects have too; "" if unknown."""
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
