"""The extender and pods that get their GPUs by ResourceClaims."""

from __future__ import annotations

import json

from fairshare.schedulers.kube_scheduler.extender import KubeSchedulerExtender
from fairshare.targets.extender import ExtenderView
from gputally.base.clock import VirtualClock
from tests.fairshare.claiming_pods import Fed, claim_object, claiming_pod
from tests.fairshare.conftest import NOW_MS


def test_the_extender_places_a_pod_with_a_claim_and_counts_those_that_run() -> None:
    """n1 has one of four GPUs left, n2 all of them: best fit is n1."""
    claims = [claim_object(f"c{n}", on="n1", devices=(f"gpu-{n}",)) for n in range(3)]
    running = [claiming_pod(f"p{n}", claim=f"c{n}", node="n1") for n in range(3)]
    asking = claiming_pod("new", claim="free")
    fed = Fed(*claims, *running, claim_object("free"), asking)
    view = ExtenderView({"n1": 4.0, "n2": 4.0}, fed.index)
    extender = KubeSchedulerExtender(lambda: view, VirtualClock(NOW_MS), with_claims=fed.pods.with_claims)
    body = json.dumps({"Pod": asking, "NodeNames": ["n1", "n2"]}).encode()
    scores = {each.host: each.score for each in extender.prioritize(body).body}
    assert scores["n1"] > scores["n2"] > 0
