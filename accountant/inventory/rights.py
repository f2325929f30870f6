"""What the accountant may do in the cluster, whichever schedulers there are; the manifests of schedulers add to it. It
changes nothing."""

from __future__ import annotations

from typing import Final

from accountant.inventory.job_kinds import OWNERS
from gputally.kubernetes.rights import Rights

RIGHTS: Final = (
    Rights("", "pods namespaces nodes", "list watch", "to know pods, teams and nodes", "accountant"),
    *OWNERS,
    Rights("authentication.k8s.io", "tokenreviews", "create", "to know callers by their tokens", "accountant"),
    Rights("authorization.k8s.io", "subjectaccessreviews", "create", "to know what callers may do", "accountant"),
)
