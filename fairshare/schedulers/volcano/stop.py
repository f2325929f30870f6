"""Stops Jobs by a Command that restarts them.

Volcano's controllers delete the Command before they act on it, so a Command can be lost. A Job that did not restart
gets another one, three in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairshare.core.gpu_demand import millis
from fairshare.schedulers.volcano.kinds import COMMAND, JOB
from fairshare.targets.whole_stop import (
    ASKED_AGAIN,
    GIVEN_UP,
    PREEMPTION,
    REASON,
    WITHOUT_INTENT,
    NextStep,
    PreemptionIntent,
    WholeStop,
)
from gputally.kubernetes.objects import Object, value_at

REISSUE_MS = 60_000
MOST_ATTEMPTS = 3


class RestartJob(WholeStop):
    """Creates Commands for Jobs."""

    kinds = (JOB,)
    commands = COMMAND
    gave_up = f"Volcano was told {MOST_ATTEMPTS} times to restart it, and it still runs"

    def change(self) -> Mapping[str, Any]:
        return {}

    def ended(self, obj: Object) -> str | None:
        phase = value_at(obj, ("status", "state", "phase"))
        return None if phase in (None, "Running") else f"it is {phase} already"

    def next_step(
        self, obj: Object, intent: PreemptionIntent, commands: Sequence[Object], now_ms: int
    ) -> NextStep | None:
        uid = obj["metadata"].get("uid")
        if any(value_at(each, ("target", "uid")) == uid for each in commands):
            return None
        since_ms = millis(value_at(obj, ("status", "state", "lastTransitionTime")))
        running = value_at(obj, ("status", "state", "phase")) == "Running"
        if not running or (since_ms is not None and since_ms > intent.at_ms):
            return NextStep("restarted", WITHOUT_INTENT)
        if now_ms - intent.at_ms < REISSUE_MS * intent.attempts:
            return None
        if intent.attempts >= MOST_ATTEMPTS:
            return NextStep(GIVEN_UP, WITHOUT_INTENT)
        again = replace(intent, attempts=intent.attempts + 1)
        name, namespace = obj["metadata"]["name"], obj["metadata"].get("namespace", "")
        reason = (obj["metadata"].get("annotations") or {}).get(REASON, "")
        change = {"metadata": {"annotations": {PREEMPTION: again.text()}}}
        return NextStep(ASKED_AGAIN, change, self.command(name, namespace, str(uid), reason))

    def command(self, name: str, namespace: str, uid: str, reason: str) -> Object:
        """Return the Command that kills a Job's pods and queues it again."""
        return {
            "apiVersion": COMMAND.api_version,
            "kind": COMMAND.kind,
            "metadata": {"generateName": "gputally-", "namespace": namespace},
            "action": "RestartJob",
            "target": {
                "apiVersion": JOB.api_version,
                "kind": JOB.kind,
                "name": name,
                "uid": uid,
                "controller": True,
            },
            "reason": "FairshareReclaim",
            "message": reason,
        }
