"""KAI-Scheduler: its Queue objects as our model, our weights as patches of `overQuotaWeight`. Pure.

Writes exactly one field, `spec.resources.gpu.overQuotaWeight`, beside our annotations. KAI's own
history (kValue with a usage database) must be off meanwhile, else the same usage counts twice:
`Effective` says so. Publishing usage instead of weights would be the other mode; never both.

Source: kai-scheduler/KAI-Scheduler, scheduling.run.ai/v2 Queue and kai.scheduler/v1 SchedulingShard,
commit d5bc503a.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal

from accountant.wire import Policy, QueuePolicy
from fairshare import marks
from fairshare.fields import look
from fairshare.model import Condition, Held, Issue, Observation, Standing
from fairshare.ports import Kind, Object

QUEUE = Kind("scheduling.run.ai/v2", "Queue", "queues")
SHARD = Kind("kai.scheduler/v1", "SchedulingShard", "schedulingshards")
GPU = "nvidia.com/gpu"
DEFAULT_K = 1.0
"""What KAI takes for an absent kValue."""

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(m|k|M|G|T|[eE][+-]?\d+)?")
_SUFFIX = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class KaiAdapter:
    """`fairshare.plan.Adapter` for KAI."""

    name = "kai"
    queue = QUEUE
    advisers = (SHARD,)

    def mode(self, policy: Policy) -> Literal["off", "dry-run", "enforce"]:
        target = policy.targets.kai
        return "off" if target.mode == "off" else target.apply

    def observe(
        self, policy: Policy, objects: Sequence[Object], advice: Mapping[Kind, Sequence[Object]]
    ) -> Observation:
        """Queues of the policy with their KAI Queue. Queues that no ref names are left alone."""
        owner = {ref.removeprefix("kai:"): q for q in policy.queues for ref in q.refs if ref.startswith("kai:")}
        named: dict[str, list[Object]] = {}
        issues: list[Issue] = []
        for obj in objects:
            queue = owner.get(obj["metadata"]["name"])
            if queue is not None:
                named.setdefault(queue.name, []).append(obj)
        held: dict[str, Held] = {}
        standings: dict[str, Standing] = {}
        differences: list[str] = []
        for queue in sorted(policy.queues, key=lambda queue: queue.name):
            found = named.get(queue.name, [])
            refs = sorted(name for name, of in owner.items() if of is queue)
            if len(found) > 1:
                names = ", ".join(obj["metadata"]["name"] for obj in found)
                issues.append(
                    Issue(queue.name, f"several KAI queues ({names}) for one queue of the policy: none is touched")
                )
            elif refs and not found:
                issues.append(Issue(queue.name, f"KAI has no queue {' or '.join(refs)}"))
            elif found:
                read = read_queue(found[0])
                if isinstance(read, Issue):
                    issues.append(read)
                    continue
                held[queue.name], standings[queue.name] = read
                differences += _differences(queue, found[0], owner)
        return Observation(held, standings, tuple(issues), (effective(advice.get(SHARD, ())), _in_sync(differences)))

    def patch(self, held: Held, weight: float | None, annotations: Mapping[str, str]) -> Object:
        """The fields we own, for server-side apply. weight None: leave it unset.

        The uid keeps the write from making a queue that has gone meanwhile."""
        metadata: dict[str, Any] = {"name": held.name}
        if held.uid:
            metadata["uid"] = held.uid
        if annotations:
            metadata["annotations"] = dict(annotations)
        patch: dict[str, Any] = {"apiVersion": QUEUE.api_version, "kind": QUEUE.kind, "metadata": metadata}
        if weight is not None:
            patch["spec"] = {"resources": {"gpu": {"overQuotaWeight": weight}}}
        return patch


def read_queue(obj: Object) -> tuple[Held, Standing] | Issue:
    """One Queue object. Unset quantities of its status are zero: nothing runs, nothing waits."""
    metadata = obj["metadata"]
    name = metadata["name"]
    gpu = look(obj, ("spec", "resources", "gpu")) or {}
    weight = gpu.get("overQuotaWeight")
    if weight is not None and not (isinstance(weight, int | float) and isfinite(weight) and weight >= 0):
        return Issue(name, f"spec.resources.gpu.overQuotaWeight is {weight!r}")
    amounts: list[float] = []
    for key in ("requested", "allocated"):
        text = look(obj, ("status", key, GPU))
        amount = 0.0 if text is None else quantity(text)
        if amount is None:
            return Issue(name, f"status.{key}[{GPU}] is {text!r}, not a quantity")
        amounts.append(amount)
    requested, allocated = max(amounts), amounts[1]
    noted = marks.read(metadata.get("annotations") or {})
    value = None if weight is None else float(weight)
    held = Held(name, metadata.get("uid", ""), metadata.get("resourceVersion", ""), value)
    if noted is None:
        return held, Standing(requested, allocated, value)
    held = Held(name, held.uid, held.version, value, noted.published, noted.base, noted.changed_ms, noted.direction)
    return held, Standing(requested, allocated, value, noted.changed_ms, noted.direction)


def quantity(value: object) -> float | None:
    """A Kubernetes quantity as a number >= 0: 4, "4", "500m". None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if isfinite(value) and value >= 0 else None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, suffix = match.groups()
    amount = float(number + suffix) if suffix and suffix[0] in "eE" else float(number) * _SUFFIX.get(suffix, 1.0)
    return amount if amount >= 0 and isfinite(amount) else None


def effective(shards: Sequence[Object]) -> Condition:
    """Whether our weights are the only history KAI sees."""
    faults: list[str] = []
    for shard in shards:
        name = shard["metadata"]["name"]
        spec = shard.get("spec") or {}
        stated = look(spec, ("plugins", "proportion", "arguments", "kValue"))
        stated = spec.get("kValue") if stated is None else stated
        k = _k(stated)
        if k != 0 and (stated is not None or spec.get("usageDBConfig")):
            said = f"kValue is {k:g}" if stated is not None else f"kValue is unset, which means {k:g}"
            faults.append(f"{said} in SchedulingShard {name}")
    if faults:
        return Condition(
            "Effective", "False", "HistoryCountedTwice", f"{'; '.join(faults)}: set it to 0, history is in the weights"
        )
    if not shards:
        return Condition("Effective", "Unknown", "NoShards", "no SchedulingShard to read: make sure that kValue is 0")
    return Condition("Effective", "True", "WeightsOnly", "KAI divides by our weights alone")


def _k(stated: object) -> float:
    """As KAI reads it: unparsable is the default, negative is 0."""
    try:
        return DEFAULT_K if stated is None else max(0.0, float(str(stated)))
    except ValueError:
        return DEFAULT_K


def _differences(queue: QueuePolicy, obj: Object, owner: Mapping[str, QueuePolicy]) -> list[str]:
    """Where the Queue says something else than the policy. We report it and write none of it."""
    spec = obj.get("spec") or {}
    gpu = look(spec, ("resources", "gpu")) or {}
    parent = owner.get(spec.get("parentQueue") or "")
    pairs: list[tuple[str, object, object]] = [
        ("quota", gpu.get("quota", 0), queue.deserved),
        ("limit", gpu.get("limit", 0), queue.limit),
        ("priority", spec.get("priority", 100), queue.priority),
        ("parent", parent.name if parent else spec.get("parentQueue"), queue.parent),
    ]
    return [
        f"{obj['metadata']['name']}: {what} {_say(there)}, policy {_say(here)}"
        for what, there, here in pairs
        if there != here
    ]


def _say(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _in_sync(differences: Sequence[str]) -> Condition:
    if differences:
        return Condition("InSync", "False", "PolicyDiffers", "; ".join(differences))
    return Condition("InSync", "True", "AsPolicy", "quota, limit, priority and parent stand as in the policy")
