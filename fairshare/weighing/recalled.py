"""What the deficit law remembers of every queue, in columns while it is asked again and again.

To whoever keeps it, it is a `Memory` as any other: numbers by name, by queue, which survive JSON. The law that finds
its own columns takes them as they are; from anything else (a status object, a decision, the cycle of a turn) it reads
them by name. Frozen; no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log

from fairshare.weighing.laws import Memory, Siblings

Row = tuple[float, float, float, float, float | None]
"""Of a queue: x, evictions, used, integral of what it lacked, and when it was looked at."""
_NOTHING: Mapping[str, float] = {}


class Recalled(Mapping[str, Mapping[str, float]]):
    """names: in their order. rows: of each. logs: of each, the log of its multiplier. It knows of no turn: who has one
    remembers that beside it."""

    __slots__ = ("_places", "logs", "names", "rows")

    def __init__(self, names: Sequence[str], rows: Sequence[Row], logs: Sequence[float]) -> None:
        self.names, self.rows, self.logs = names, rows, logs
        self._places: dict[str, int] | None = None

    @classmethod
    def of(cls, memory: Memory, siblings: Siblings) -> Recalled:
        """Of these siblings; of a new one nothing."""
        columns = siblings.columns
        if isinstance(memory, cls) and memory.names == columns.names:
            return memory
        rows: list[Row] = []
        logs: list[float] = []
        for name, weight, now in zip(columns.names, columns.weights, columns.weights_now, strict=True):
            get = memory.get(name, _NOTHING).get
            rows.append((get("x", 0.0), get("evictions", 0.0), get("used", 0.0), get("credit", 0.0), get("at_ms")))
            y = get("y")
            logs.append(y if y is not None else log(now / weight) if now and weight > 0 else 0.0)
        return cls(columns.names, rows, logs)

    def __getitem__(self, name: str) -> dict[str, float]:
        if self._places is None:
            self._places = {each: place for place, each in enumerate(self.names)}
        place = self._places[name]
        x, evictions, used, credit, at_ms = self.rows[place]
        kept = {"x": x, "evictions": evictions, "used": used, "credit": credit}
        if at_ms is not None:
            kept["at_ms"] = at_ms
        kept["y"] = self.logs[place]
        return kept

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
