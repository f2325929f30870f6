"""The entries of the books: what the acts that make them say in the journal, and the books they add up to.

The content of every such act is written and read here alone. Bytes that were recorded stay readable for ever. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Final

from pydantic import TypeAdapter

from accountant.books.closing import Books, ClosedMonth
from accountant.books.credits import NodeSpan
from accountant.books.statements import Adjustment, Correction, Statement, as_text, canonical, from_canonical
from accountant.journal import Act, ActKind, NewAct

ENTRIES: Final[tuple[ActKind, ...]] = (
    "closed", "reopened", "published", "repriced", "corrected", "refused", "adjusted",
)  # fmt: skip
"""The kinds of acts that `fold` is about."""
_CREDITED = "credited"
"""In an adjustment's content: the node and span that it is for."""
_CORRECTIONS = TypeAdapter(tuple[Correction, ...])
_ADJUSTMENT = TypeAdapter(Adjustment)


def fold(acts: Iterable[Act], seen: int) -> Books:
    """The books that acts of `ENTRIES` add up to, in the order of recording. seen: the number of the last act of any
    kind."""
    closed: dict[str, ClosedMonth] = {}
    corrections: list[Correction] = []
    adjustments: list[Adjustment] = []
    refused: list[Correction] = []
    for act in acts:
        match act.kind:
            case "closed":
                content = json.loads(act.content)
                closed[act.subject] = ClosedMonth(
                    act.subject, content["hash"], content["statement"], content["priced_by"], act.at_ms, act.who
                )
            case "reopened":
                closed.pop(act.subject, None)
                # What they corrected is part of the month again.
                corrections = [correction for correction in corrections if correction.month != act.subject]
                refused = [one for one in refused if one.month != act.subject]
            case "published":
                closed[act.subject] = replace(closed[act.subject], published=True)
            case "repriced":
                closed[act.subject] = replace(closed[act.subject], priced_by=json.loads(act.content)["priced_by"])
            case "corrected":
                corrections += _CORRECTIONS.validate_json(act.content)
            case "refused":
                refused += _CORRECTIONS.validate_json(act.content)
            case "adjusted":
                adjustments.append(_ADJUSTMENT.validate_json(act.content))
    return Books(
        tuple(closed[name] for name in sorted(closed)), tuple(corrections), tuple(adjustments), tuple(refused), seen
    )


def stated(closed: ClosedMonth) -> Statement:
    """The statement of a closed month, from its bytes."""
    return from_canonical(closed.content.encode())


def credited(acts: Iterable[Act]) -> list[NodeSpan]:
    """Spans of nodes that adjustments among these acts are for."""
    contents = [json.loads(act.content) for act in acts if act.kind == "adjusted"]
    return [NodeSpan.model_validate(content[_CREDITED]) for content in contents if _CREDITED in content]


def closing(final: Statement) -> NewAct:
    """Of a statement that says its month, and who closes it."""
    assert final.month is not None
    assert final.closing is not None
    content = {"statement": canonical(final).decode(), "hash": final.hash, "priced_by": final.price_book_version}
    by = final.closing
    return NewAct(by.at_ms, "closed", final.month, by.who, by.reason, json.dumps(content))


def repricing(month: str, version: str, who: str, reason: str, at_ms: int) -> NewAct:
    """From now on the closed month is corrected by that version of the price book."""
    return NewAct(at_ms, "repriced", month, who, reason, json.dumps({"priced_by": version}))


def correcting(month: str, corrections: Sequence[Correction], who: str, reason: str, at_ms: int) -> NewAct:
    """Corrections of one closed month."""
    content = json.dumps([asdict(correction) for correction in corrections], default=as_text)
    return NewAct(at_ms, "corrected", month, who, reason, content)


def refusing(month: str, lines: Sequence[Correction], who: str, reason: str, at_ms: int) -> NewAct:
    """What arrived late for a closed month and is not booked."""
    content = json.dumps([asdict(line) for line in lines], default=as_text)
    return NewAct(at_ms, "refused", month, who, reason, content)


def adjusting(adjustment: Adjustment, span: NodeSpan | None = None) -> NewAct:
    """span: what the credit is for, where it is for a node."""
    content = asdict(adjustment)
    if span is not None:
        content[_CREDITED] = span.model_dump(mode="json")
    return NewAct(
        adjustment.at_ms, "adjusted", adjustment.month, adjustment.who, adjustment.reason,
        json.dumps(content, default=as_text),
    )  # fmt: skip
