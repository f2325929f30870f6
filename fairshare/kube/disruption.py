"""PodDisruptionBudgets as the eviction subresource applies them, for the API server in memory. Pure.

The order of the checks is the API server's, its trap included: an eviction whose uid is another pod's has
by then cost the budget one disruption. Source: Kubernetes 1.36, registry/core/pod/rest/eviction.go, and its
answers in our vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairshare.errors import Blocked, Refused
from fairshare.kube.fields import look
from fairshare.kube.kinds import Kind, Object

BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True)
_UNGUARDED = frozenset({"Pending", "Succeeded", "Failed"})


def guard(pod: Object, budgets: Sequence[Object]) -> Object | None:
    """The budget that pays for evicting `pod`; None where none does. Raises Blocked or Refused."""
    metadata = pod["metadata"]
    if metadata.get("deletionTimestamp") or look(pod, ("status", "phase")) in _UNGUARDED:
        return None
    claims = [
        budget
        for budget in budgets
        if budget["metadata"].get("namespace") == metadata.get("namespace")
        and selects(look(budget, ("spec", "selector")) or {}, metadata.get("labels") or {})
    ]
    if len(claims) > 1:
        raise Refused(
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        )
    if not claims:
        return None
    if (look(claims[0], ("status", "disruptionsAllowed")) or 0) <= 0:
        raise Blocked("Cannot evict pod as it would violate the pod's disruption budget.")
    return claims[0]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for rule in selector.get("matchExpressions") or ():
        value, values = labels.get(rule["key"]), rule.get("values") or ()
        fits = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not fits[rule["operator"]]:
            return False
    return True
