"""Settings of a policy that fit only the other mode of the target KAI."""

from __future__ import annotations

from collections.abc import Iterator

from accountant.wire.policy_models import Policy
from fairshare.schedulers.kai.section import KaiTarget
from fairshare.targets.weight_plan import Advice


def advice(policy: Policy) -> Iterator[Advice]:
    """Yield the warnings. History must count once."""
    kai = KaiTarget.of(policy)
    if kai.mode == "usage":
        if policy.measure != "allocated" or policy.window.gpu_weights:
            text = "KAI's own history counts GPU time as it was held: for this measure set `targets.kai.mode: weight`"
            yield Advice(("measure",), text)
        if any(budget.exhausted == "no-over-quota" for budget in policy.budgets):
            text = "in mode `usage` a used-up budget changes no weight: set `mode: weight`"
            yield Advice(("targets", "kai", "mode"), text)
        if policy.window.kind != "sliding":
            yield Advice(("window", "kind"), f"KAI's history can be sliding only, not {policy.window.kind}")
        if kai.endpoint is None:
            text = "set `endpoint` to the address that KAI queries: without it, shards that query another go unnoticed"
            yield Advice(("targets", "kai", "mode"), text)
    elif kai.endpoint is not None:
        text = (
            f"`endpoint` has no effect in mode `{kai.mode}`: shards that read usage as well would count history twice"
        )
        yield Advice(("targets", "kai", "endpoint"), text)
