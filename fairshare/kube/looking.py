"""Read one target as it stands: its objects in the version that is served, and what waits in its queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accountant.wire import Policy
from fairshare.errors import ClusterError, NotFound, Refused
from fairshare.kube.demand import smallest_waiting
from fairshare.kube.kinds import Kind, Object
from fairshare.kube.mapping import say
from fairshare.kube.ports import Readable
from fairshare.model import Condition, Observation, Pod
from fairshare.plan import Adapter, Read

_RIGHTS = (
    "let the controller read them: `gputally doctor --only permissions` names the rights; a scheduler's ConfigMap"
    " belongs into `fairshare.rbac.schedulerConfigMaps` of the chart"
)


def look_at(adapter: Adapter, policy: Policy, cluster: Readable, pods: Sequence[Pod] = ()) -> Observation:
    """One target as it stands. Raises ClusterError where what it must read is not there.

    What is there and not for us to read is left out, and said: without it demand is reckoned too low."""
    seen: dict[Kind, Sequence[Object]] = {}
    refused: list[str] = []
    for read in adapter.reads(policy):
        found = _read(cluster, read, refused)
        if found is not None:
            seen[found[0]] = found[1]
    observation = adapter.observe(policy, seen, pods)
    waiting = smallest_waiting(observation.gangs)
    standings = {
        queue: replace(standing, gang=waiting.get(queue, standing.gang))
        for queue, standing in observation.standings.items()
    }
    said = [Condition("Readable", "False", "ReadRefused", say(refused), _RIGHTS)] if refused else []
    return replace(observation, standings=standings, conditions=(*observation.conditions, *said))


def list_if_served(cluster: Readable, kind: Kind) -> Sequence[Object]:
    """Objects that are read for advice: none where the kind is unknown or not for us to read."""
    found = _read(cluster, Read((kind,)), [])
    return found[1] if found is not None else ()


def _read(cluster: Readable, read: Read, refused: list[str]) -> tuple[Kind, Sequence[Object]] | None:
    """Objects of the first kind that is served; None: of none, or not for us to read, which is noted in `refused`.
    Raises for what is required."""
    absent: ClusterError | None = None
    for kind in read.kinds:
        try:
            if read.name:
                return kind, (cluster.get(kind, read.name, read.namespace),)
            return kind, cluster.list(kind, fields=read.fields) if read.fields else cluster.list(kind)
        except NotFound as error:
            absent = absent or error
        except Refused as error:
            if read.required:
                raise
            absent = absent or error
            refused.append(str(error))
            break
    if read.required and absent is not None:
        raise absent
    return None
