"""One question to the present state of a ledger, for tests that need no second answer from the same commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


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
