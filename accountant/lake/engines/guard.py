"""Opens engines, those of other packages so that they can stop nothing and answer nothing but tables of exact figures.

Each call of an engine of another package runs on a thread of its own. If it raises, takes too long or returns something
else, the query fails with the engine's name and the reason. While a call has not ended after its time, no further one
begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
import pyarrow.types as arrow

from accountant.core.errors import LakeUnavailable
from accountant.lake.engines.protocol import SEAM, Engine, EnginePlugin
from accountant.lake.iceberg_catalog import PREFIX, described
from gputally.base.errors import CannotStart
from gputally.base.plugins import OURS, TakesTooLong, named, plugins, within

if TYPE_CHECKING:
    from sqlglot import exp

    from accountant.core.settings import Lake

T = TypeVar("T")
MOST_CALL_S: Final = 600.0
"""How long a call of an engine of another package may take."""
_MOST_NAMESPACES: Final = 100_000
_METHODS: Final = ("namespaces", "query", "close")
"""The methods of an `Engine`."""


def open_engine(name: str, lake: Lake, url: str = "") -> Engine:
    """The engine of that name over a lake. url: see EnginePlugin. Raises LakeUnavailable, NoPlugin, and CannotStart if
    the engine takes no address and is given one."""
    plugin = named(SEAM, EnginePlugin, name)
    if url and not plugin.urls:
        raise CannotStart(
            f"the engine {name} takes no address: leave out --engine-url (GPUTALLY_ENGINE_URL), or name with --engine "
            "the one that is there"
        )
    (brought,) = (one for one in plugins(SEAM, EnginePlugin) if one.manifest is plugin)
    if brought.package == OURS:
        return plugin.open(lake, url)
    return GuardedEngine.opened(plugin, f"{name} of the package {brought.package} {brought.version}", lake, url)


class GuardedEngine:
    """The engine of another package. what: names it in messages."""

    def __init__(self, engine: Engine, what: str, most_s: float = MOST_CALL_S) -> None:
        self._engine, self._what, self._most_s = engine, what, most_s
        self._hanging: threading.Event | None = None

    @classmethod
    def opened(
        cls, plugin: EnginePlugin, what: str, lake: Lake, url: str, most_s: float = MOST_CALL_S
    ) -> GuardedEngine:
        def call() -> Engine:
            engine = plugin.open(lake, url)
            for name in _METHODS:
                if not callable(getattr(engine, name, None)):
                    raise TypeError(f"what it opens has no method {name}")
            return engine

        return cls(_guarded(what, most_s, call), what, most_s)

    def namespaces(self) -> Sequence[str]:
        def call() -> list[str]:
            found: list[Any] = list(self._engine.namespaces())
            for name in found:
                if not isinstance(name, str) or not name.startswith(PREFIX):
                    raise TypeError(f"{name!r} is no namespace of a ledger")
            if len(found) > _MOST_NAMESPACES:
                raise TypeError(f"it names {len(found):,} ledgers")
            return sorted(set(found))

        return self._call(call)

    def query(self, question: exp.Select, namespace: str, days: tuple[date, date] | None = None) -> pa.Table:
        return self._call(lambda: checked(self._engine.query(question.copy(), namespace, days), question))

    def close(self) -> None:
        self._call(self._engine.close)

    def _call(self, call: Callable[[], T]) -> T:
        if self._hanging is not None and not self._hanging.is_set():
            raise LakeUnavailable(f"the engine {self._what}: an earlier query has not ended")
        try:
            return _guarded(self._what, self._most_s, call)
        except LakeUnavailable as error:
            if isinstance(error.__cause__, TakesTooLong):
                self._hanging = error.__cause__.done
            raise


def _guarded(what: str, most_s: float, call: Callable[[], T]) -> T:
    try:
        return within(most_s, call)
    except LakeUnavailable as error:
        raise LakeUnavailable(f"the engine {what}: {described(error)}") from error
    except Exception as error:
        raise LakeUnavailable(f"the engine {what} failed: {type(error).__name__}: {described(error)}") from error


def checked(answer: object, question: exp.Select) -> pa.Table:
    """The answer with plain types. Raises TypeError if it is no table, has other columns than the query, or figures
    that are not exact."""
    if not isinstance(answer, pa.Table):
        raise TypeError(f"its answer is of the type {type(answer).__name__}, not a table of Arrow")
    if answer.column_names != question.named_selects:
        raise TypeError(f"it answers with the columns {answer.column_names}, not {question.named_selects}")
    if len(set(answer.column_names)) < len(answer.column_names):
        raise TypeError("it answers with two columns of one name")
    return answer.cast(pa.schema([(one.name, _plain(one)) for one in answer.schema]))


def _plain(field: pa.Field) -> pa.DataType:
    kind = field.type.value_type if arrow.is_dictionary(field.type) else field.type
    if arrow.is_large_string(kind) or arrow.is_string_view(kind):
        return pa.string()
    if not any(is_one(kind) for is_one in _EXACT):
        raise TypeError(f"its column {field.name} has the type {kind}, which is no exact figure, text, date or instant")
    return kind


_EXACT: Final = (
    arrow.is_integer, arrow.is_decimal, arrow.is_string, arrow.is_boolean, arrow.is_date, arrow.is_timestamp,
    arrow.is_null,
)  # fmt: skip
