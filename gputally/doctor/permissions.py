"""Asking the API server who may what: about the installed programs' accounts where they are found, else the caller."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fairshare.errors import ClusterError
from fairshare.kube.kinds import Kind
from gputally.doctor.rights import NEEDS, OWN, PREEMPTING, PROGRAMS, Right, needed
from gputally.doctor.sources import Ground

SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts", namespaced=True, status=False)
_NAME, _COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
_OTHERS = {"group": "authorization.k8s.io", "resource": "subjectaccessreviews", "verb": "create"}


def ask(
    ground: Ground, namespace: str, *, preempts: bool = False, configs: Collection[str] = ()
) -> tuple[dict[str, dict[Right, bool]], dict[str, str]]:
    """(what each program may, whose rights these are). namespace: of the release, where no account says it.
    configs: ConfigMaps of schedulers that the policy names."""
    served = ground.served({right.group for rights in (*NEEDS.values(), PREEMPTING) for right in rights})
    accounts = _accounts(ground)
    answers: dict[str, dict[Right, bool]] = {}
    users: dict[str, str] = {}
    if not accounts:
        caller = ground.caller() or "this caller"
        accounts = dict.fromkeys(PROGRAMS, ("", namespace))
        users = dict.fromkeys(PROGRAMS, caller)
    for program, (user, home) in accounts.items():
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{home}", "system:authenticated") if user else ()
        answers[program] = {
            right: ground.may(_attributes(right, home, user.rpartition(":")[2]), user, groups)
            for right in needed(program, served, preempts=preempts, configs=configs)
        }
        users.setdefault(program, user)
    return answers, users


def _accounts(ground: Ground) -> dict[str, tuple[str, str]]:
    """(user, namespace) by program, as the chart's labels say; none where they may not be listed or asked about."""
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


def _attributes(right: Right, namespace: str, account: str) -> dict[str, str]:
    """account: the controller's own objects are called like it."""
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
