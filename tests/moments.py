"""What a ledger knows at present, for tests that need no second answer from the same commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accountant.storage.duckdb_ledger import DuckLedger
from agent.wire import Ack


class present:
    """Answers each question from a moment of its own. `usage` and `imbalance` get the rows of their span."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def __getattr__(self, question: str) -> Callable[..., Any]:
        def answer(*arguments: Any, **named: Any) -> Any:
            span = {"usage": lambda edges, *_: (edges[0], edges[-1]), "imbalance": lambda *span: span}.get(question)
            with self._ledger.moment(*(() if span is None else span(*arguments))) as moment:
                found = getattr(moment, question)(*arguments, **named)
                return list(found) if isinstance(found, Iterator) else found

        return answer


def acks(ledger: DuckLedger, node: str, cluster: str) -> Mapping[str, Ack]:
    """Return the acknowledgements of all outboxes that a node ever had, by epoch."""
    found = [outbox for outbox in ledger.outboxes() if outbox[:2] == (cluster, node)]
    return {outbox[2]: ledger._ack(outbox) for outbox in sorted(found)}
