"""What a program may do in the cluster, and what for. Manifests of plug-ins state it; the roles of the chart and the
doctor's check of rights come from there."""

from __future__ import annotations

import msgspec


class Rights(msgspec.Struct, frozen=True):
    """Rights in the cluster. For a kind that the API server does not serve, none is needed.

    group: the API group; "" for the core.
    resources, verbs: words, separated by spaces.
    why: what they are for.
    program: who needs them: `agent`, `accountant` or `fairshare` (the controller).
    name: the name of the only object that they are for; "" for all.
    setting: the key of the scheduler's section of the policy that names another object, as NAMESPACE/NAME.
    preempting: whether they are needed only if the policy stops workloads.
    owners: whether they are for objects that own pods, by which the accountant names jobs. Without them it names a job
        after an owner that is nearer to the pod."""

    group: str
    resources: str
    verbs: str
    why: str
    program: str = "fairshare"
    name: str = ""
    setting: str = ""
    preempting: bool = False
    owners: bool = False

    def __str__(self) -> str:
        things = f"{self.resources}.{self.group}" if self.group else self.resources
        return f"{self.program}: {self.verbs} {things}{f' {self.name}' if self.name else ''}: {self.why}"
