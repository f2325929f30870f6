"""Leave no trace of ours on what a policy refers to: every touched object gets its own weight back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accountant.wire import Policy
from fairshare.kube.looking import look_at
from fairshare.kube.mapping import referred
from fairshare.kube.ports import Cluster, Objects
from fairshare.plan import Adapter, Apply, release
from fairshare.publishing.carrying import carry_out
from fairshare.report import Outcome
from fairshare.targets import ADAPTERS


def release_weights(
    policy: Policy,
    cluster: Cluster,
    adapters: Sequence[Adapter] = ADAPTERS,
    *,
    clusters: Mapping[str, Objects] | None = None,
    dry_run: bool = False,
    left_behind: bool = False,
) -> tuple[Outcome, ...]:
    """Give every touched object of the targets that the policy refers to its base weight back. clusters: by adapter,
    as for the Controller. left_behind: only of those that no queue of the policy is tied to any more.

    Raises ClusterError where a target cannot be read."""
    planned: list[tuple[Objects, Sequence[Apply]]] = []
    for adapter in adapters:
        if referred(policy, *adapter.prefixes):
            there = (clusters or {}).get(adapter.name, cluster)
            planned.append((there, release(adapter, look_at(adapter, policy, there), left_behind=left_behind)))
    return tuple(each for there, applies in planned for each in carry_out(there, applies, dry_run=dry_run))
