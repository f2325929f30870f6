"""Records each attempt to deliver a message, and when it is tried again.

Before anything is sent an act says so, and afterwards another says how it ended. An attempt that is known to have
failed is repeated, later and later. One whose end is not known (the process died, the connection broke after the letter
was handed over) is not: it may have arrived. A person may order it `again`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from accountant.ledger.journal import Act, NewAct
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND

Outcome = Literal["sending", "delivered", "refused", "unsure", "given-up", "again"]
FIRST_PAUSE_MS: Final = 60 * MS_PER_SECOND
LONGEST_PAUSE_MS: Final = 6 * MS_PER_HOUR
PATIENCE_MS: Final = 3 * MS_PER_DAY
"""How long a delivery is tried before a person has to look."""
WHO: Final = "accountant"
_MOST_DETAIL = 400


@dataclass(frozen=True, slots=True)
class Delivery:
    """key: what is sent where, the same for every attempt. tries: since the first, or since it was asked for
    `again`."""

    key: str
    outcome: Outcome
    tries: int
    first_ms: int
    last_ms: int
    detail: str = ""

    @property
    def due_ms(self) -> int | None:
        """When it is tried again; None: never by itself."""
        if self.outcome == "again":
            return self.last_ms
        if self.outcome != "refused":
            return None
        return self.last_ms + min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS << min(self.tries - 1, 20))


def next_attempt(before: Delivery | None, key: str, outcome: Outcome, at_ms: int, detail: str = "") -> Delivery:
    """The delivery once this happened to it."""
    if before is None or outcome == "again":
        return Delivery(key, outcome, int(outcome != "again"), at_ms, at_ms, detail)
    tries = before.tries + (outcome == "sending")
    first = at_ms if before.outcome == "again" else before.first_ms
    return replace(before, outcome=outcome, tries=tries, first_ms=first, last_ms=at_ms, detail=detail)


def ended_how(before: Delivery, at_ms: int) -> Outcome:
    """Of an attempt that was refused: whether it is worth another."""
    return "given-up" if at_ms - before.first_ms >= PATIENCE_MS else "refused"


def act(delivery: Delivery, who: str = WHO) -> NewAct:
    """As it is recorded."""
    content = json.dumps({"outcome": delivery.outcome})
    return NewAct(delivery.last_ms, "delivery", delivery.key, who, delivery.detail[:_MOST_DETAIL], content)


def deliveries_from_acts(acts: Iterable[Act]) -> dict[str, Delivery]:
    """By key, in the order of the first act about each."""
    found: dict[str, Delivery] = {}
    for one in acts:
        outcome: Outcome = json.loads(one.content)["outcome"]
        found[one.subject] = next_attempt(found.get(one.subject), one.subject, outcome, one.at_ms, one.reason)
    return found
