"""Encodes and decodes the content of acts that close months, correct them, keep drafts and book amounts; what was
recorded stays readable in later releases. `fold_acts` derives the state of all months from the acts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Final, Literal

from pydantic import TypeAdapter

from accountant.billing.statements import Adjustment, Correction, Statement, as_text, canonical, from_canonical
from accountant.bookkeeping.corrections_and_adjustments import NodeSpan
from accountant.bookkeeping.month_changes import DraftAmounts, MonthDraft
from accountant.bookkeeping.month_closing import ClosedMonth, ClosedMonths, statement_hash
from accountant.ledger.journal import Act, ActKind, NewAct

ENTRIES: Final[tuple[ActKind, ...]] = (
    "closed", "reopened", "published", "repriced", "corrected", "refused", "adjusted",
)  # fmt: skip
"""The kinds of acts that `fold_acts` uses."""
_CREDITED = "credited"
"""Key in an adjustment's content: the node and span that it is for."""
_CORRECTIONS = TypeAdapter(tuple[Correction, ...])
_ADJUSTMENT = TypeAdapter(Adjustment)
_DRAFT = TypeAdapter(DraftAmounts)


def fold_acts(acts: Iterable[Act], seen: int) -> ClosedMonths:
    """The state after acts of the kinds in `ENTRIES`, in the order of recording.

    seen: the number of the last act of any kind."""
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
                # Corrections of a reopened month are part of the month again.
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
    return ClosedMonths(
        tuple(closed[name] for name in sorted(closed)), tuple(corrections), tuple(adjustments), tuple(refused), seen
    )


def closed_statement(closed: ClosedMonth) -> Statement:
    """The statement of a closed month, from its stored bytes."""
    return from_canonical(closed.content.encode())


def credited_spans(acts: Iterable[Act]) -> list[NodeSpan]:
    """The spans of nodes for which these acts book credits."""
    contents = [json.loads(act.content) for act in acts if act.kind == "adjusted"]
    return [NodeSpan.model_validate(content[_CREDITED]) for content in contents if _CREDITED in content]


def closing_act(final: Statement) -> NewAct:
    """The act that closes a month with this statement."""
    assert final.month is not None
    assert final.closing is not None
    content = {
        "statement": canonical(final).decode(),
        "hash": statement_hash(final),
        "priced_by": final.price_book_version,
    }
    by = final.closing
    return NewAct(by.at_ms, "closed", final.month, by.who, by.reason, json.dumps(content))


def corrections_act(
    kind: Literal["corrected", "refused"], month: str, lines: Sequence[Correction], who: str, reason: str, at_ms: int
) -> NewAct:
    """The act that books or refuses corrections of one closed month."""
    return NewAct(at_ms, kind, month, who, reason, json.dumps([asdict(line) for line in lines], default=as_text))


def adjustment_act(adjustment: Adjustment, span: NodeSpan | None = None) -> NewAct:
    """The act that books an adjustment. span: the node and time of a node's credit."""
    content = asdict(adjustment)
    if span is not None:
        content[_CREDITED] = span.model_dump(mode="json")
    return NewAct(
        adjustment.at_ms, "adjusted", adjustment.month, adjustment.who, adjustment.reason,
        json.dumps(content, default=as_text),
    )  # fmt: skip


def booked_by(act: Act) -> tuple[tuple[Correction, ...], tuple[Adjustment, ...]]:
    """The corrections and adjustments that an act booked."""
    if act.kind == "corrected":
        return _CORRECTIONS.validate_json(act.content), ()
    return (), (_ADJUSTMENT.validate_json(act.content),) if act.kind == "adjusted" else ()


def draft_of(act: Act) -> MonthDraft:
    """The draft that an act keeps."""
    return MonthDraft(act.subject, act.number, act.at_ms, act.who, act.reason, _DRAFT.validate_json(act.content))
