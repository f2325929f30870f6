"""Returns the accountant's answers as pandas DataFrames (`gputally.connect()`).

Times are UTC timestamps. GPU time and energy are integers with the unit in the column's name. Money is
`decimal.Decimal` with a currency. An unknown value is missing, never zero. The client fetches all pages, so a result is
complete; otherwise the client raises an exception. The module needs only pandas and `gputally.base`."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from operator import index
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from gputally.base.accountant_connection import AccountantConnection, Query, Unanswered
from gputally.base.measures import REPORTED

Instant = str | int | date | datetime | pd.Timestamp
"""A point in time: RFC 3339 text, UTC milliseconds (numpy's integers too), a datetime with a time zone, or a date,
which means its local midnight."""

_ACCOUNTS = {
    name: f"{name}_gpu_us"
    for name in ("busy", "allocated_idle", "allocated_unknown", "unallocated", "unmetered", "down")
}
_MEMOS = (
    "borrowed_busy_us", "unattributed_busy_us",
    *(name for each in REPORTED for name in (each.field, each.unknown_field)),
)  # fmt: skip
_UNLESS_UNKNOWN = [each.field for each in REPORTED if each.known == "held"]
_BREAKDOWN = ("starting_us", "gang_waiting_us", "running_idle_us", "reserved_unused_us")
_OF_LINE = ("team", "account", "detail", "gpu_model", "capacity_type", "price_row")
_LINE_TYPES = {"unit_price": "object", "gpu_us": "int64", "gpu_hours": "object", "cost": "object"}
_OF_JOB = ("id", "cluster", "namespace", "job", "teams", "queues", "users", "gpu_models", "state")
_JOB_TYPES = {
    "pods": "int64", "epochs": "int64", "waited_ms": "Int64", "waiting_ms": "Int64", "unpriced_gpu_us": "int64",
    "gpus": "object", "cost": "object", "burn_per_hour": "object",
}  # fmt: skip
_HELD = {name: f"{name}_gpu_us" for name in ("busy", "allocated_idle", "allocated_unknown")}
_COSTS = ("cost", "held_cost", "unheld_cost")
_DECIMALS_OF_LINE = ("unit_price", "gpu_hours", "cost")
_DECIMALS_OF_JOB = ("gpus", "cost", "burn_per_hour")
_OF_JOBS = ("currency", "total_cost", "total_burn_per_hour", "price_book_version")
_OF_STATEMENT = (
    "cost", "due", "due_total", "not_billed", "currency", "status", "hash", "coverage", "unpriced_gpu_us",
    "price_book_version",
)  # fmt: skip
_OF_DECISION = (
    "id", "kind", "target", "subject", "mode", "value", "previous", "reason", "policy_version", "inputs", "cluster",
)  # fmt: skip


def connect(url: str, token: str | None = None, *, ca_file: str | Path | None = None) -> Client:
    """Return a client of the accountant at `url`, and send no request yet. Raises Unanswered for an invalid address.

    ca_file: PEM file of the CAs to trust for https, instead of the system's."""
    return Client(AccountantConnection(url, token, Path(ca_file) if ca_file is not None else None))


class Client:
    """A client of the accountant. Every method raises Unanswered (gputally.base.accountant_connection) with a one-line
    message if there is no valid answer."""

    def __init__(self, accountant: AccountantConnection) -> None:
        self._accountant = accountant

    def usage(
        self,
        start: Instant | None = None,
        end: Instant | None = None,
        by: Sequence[str] = ("team",),
        where: Mapping[str, str | Sequence[str]] | None = None,
        timezone: str | None = None,
        *,
        breakdown: bool = False,
    ) -> pd.DataFrame:
        """Return GPU-microseconds per group and account. Without `where`, and with a token for all teams, the
        six accounts of all rows add up to the capacity.

        The columns are the dimensions of `by`, then `<account>_gpu_us` for each account, then the other figures
        (measures of held time, such as `memory_mib_s` and `sm_active_us`, are missing if unknown).

        start, end: default to the beginning of the month and to now.
        breakdown: True for further columns: `starting_us`, `gang_waiting_us` and `running_idle_us`, which add up to
            allocated_idle, and `reserved_unused_us`.

        attrs: coverage (the metered share of the whole span, without filters, 0 to 1)."""
        query = _grouped(start, end, by, where, timezone) | ({"breakdown": "true"} if breakdown else {})
        memos = (*_MEMOS, *(_BREAKDOWN if breakdown else ()))
        types = dict.fromkeys([*_ACCOUNTS.values(), *memos], "int64") | dict.fromkeys(_UNLESS_UNKNOWN, "Int64")
        with _valid_answer("/v1/usage"):
            pages = self._pages("/v1/usage", query)
            rows = (
                line["key"]
                | {column: line["accounts_gpu_us"][name] for name, column in _ACCOUNTS.items()}
                | {memo: line[memo] for memo in memos}
                for page in pages
                for line in page["lines"]
            )
            frame = _frame(rows, by, types)
            frame.attrs["coverage"] = pages[-1]["coverage"]
        return frame

    def cost(
        self,
        start: Instant | None = None,
        end: Instant | None = None,
        by: Sequence[str] = ("team",),
        where: Mapping[str, str | Sequence[str]] | None = None,
        timezone: str | None = None,
    ) -> pd.DataFrame:
        """Return billed GPU time and its exact cost per group, of which `unheld_cost` is of time that nobody held and
        `held_cost` of the rest. Costs are Decimal, or None if some of the time has no price.

        attrs: total (None if any time has no price), price_book_version."""
        with _valid_answer("/v1/cost"):
            pages = self._pages("/v1/cost", _grouped(start, end, by, where, timezone))
            rows = (_with_decimals(line["key"] | line, _COSTS) for page in pages for line in page["lines"])
            frame = _frame(rows, by, {"gpu_us": "int64", **dict.fromkeys(_COSTS, "object"), "unpriced_gpu_us": "int64"})
            last = _with_decimals(pages[-1], ["total"])
            frame["currency"] = pd.Series([last["currency"]] * len(frame), dtype="str")
            frame.attrs.update({name: last[name] for name in ("total", "price_book_version")})
        return frame

    def statement(self, month: str, team: str | None = None) -> pd.DataFrame:
        """Return the statement's lines of a calendar month (`2026-10`), for the whole cluster or one team. A closed
        month is returned as it was closed.

        `gpu_us` is an integer; `gpu_hours`, `unit_price` and `cost` are Decimal (None without a price). The gpu_us of
        the lines of the whole cluster add up to the capacity. The costs of the lines add up to attrs["cost"].
        attrs["due"] is the amount that each team owes, rounded to the currency's minor unit (Decimal 12.34, not 1234),
        with commitments, corrections and credits; attrs["not_billed"] is the amount of what no team is billed for (None
        if there is none).

        attrs: cost, due, due_total, not_billed, currency, status, hash, coverage, unpriced_gpu_us,
        price_book_version."""
        with _valid_answer("/v1/statement"):
            content = self._accountant.get("/v1/statement", {"month": month, "team": team})
            statement = {**json.loads(content), "hash": hashlib.sha256(content).hexdigest()}
            rows = (_with_decimals(line, _DECIMALS_OF_LINE) for line in statement["lines"])
            frame = _frame(rows, (), _LINE_TYPES, columns=(*_OF_LINE, *_LINE_TYPES))
            frame.insert(0, "month", pd.Series([month] * len(frame), dtype="str"))
            due = {team: Decimal(amount) for team, amount in statement["due"].items()}
            beside = due.pop("__idle__", None)  # what is not billed, in a month that was closed with schema 1
            known = statement["due_total"] is not None
            totals = _with_decimals(statement, ["cost"]) | {
                "due": due,
                "due_total": sum(due.values(), Decimal(0)) if known else None,
                "not_billed": beside if statement.get("not_billed") is None else Decimal(statement["not_billed"]),
            }
            frame.attrs.update({name: totals[name] for name in _OF_STATEMENT})
        return frame

    def jobs(
        self,
        start: Instant | None = None,
        end: Instant | None = None,
        where: Mapping[str, str | Sequence[str]] | None = None,
        state: Literal["waiting", "running", "ended", "failed", "unknown"] | None = None,
        timezone: str | None = None,
    ) -> pd.DataFrame:
        """Return the jobs with their usage in the span, one per row. What `where` excludes of a job does not count.

        The columns are names (several joined by `;`), `state`, `pods`, `epochs`, held GPU time by account in
        microseconds, `waited_ms`, `waiting_ms` (of the pod that has waited longest and still waits), and `gpus`,
        `cost` and `burn_per_hour` as Decimal. The costs are None if some of the time has no price, and what a job holds
        now is None if that is unknown.

        attrs: currency, total_cost, total_burn_per_hour, price_book_version."""
        query = _grouped(start, end, (), where, timezone) | {"state": state}
        with _valid_answer("/v1/jobs"):
            pages = self._pages("/v1/jobs", query)
            rows = (
                _with_decimals(job, _DECIMALS_OF_JOB)
                | {name: ";".join(job[name]) for name in ("teams", "queues", "users", "gpu_models")}
                | {column: job["accounts_gpu_us"][name] for name, column in _HELD.items()}
                for page in pages
                for job in page["jobs"]
            )
            frame = _frame(rows, _OF_JOB, {**_JOB_TYPES, **dict.fromkeys(_HELD.values(), "int64")})
            last = _with_decimals(pages[-1], ["total_cost", "total_burn_per_hour"])
            frame.attrs.update({name: last[name] for name in _OF_JOBS})
        return frame

    def window(
        self,
        size: str = "7d",
        half_life: str | None = None,
        measure: Literal["allocated", "busy", "cost", "energy"] = "allocated",
        at: Instant | None = None,
        kind: Literal["sliding", "tumbling", "cron", "calendar"] = "sliding",
        start: Instant | None = None,
        cron: str | None = None,
        gpu_weights: Mapping[str, Decimal | int] | None = None,
        cluster: str | None = None,
    ) -> pd.DataFrame:
        """Return the usage of every queue over the window that ends at `at`.

        The columns are `queue`, `usage` in the unit of attrs["unit"], and `share` of the window's capacity.

        kind: as in the policy; `tumbling` needs `start`, and `cron` needs `cron`.
        gpu_weights: the weight of GPU time by model.
        cluster: the cluster whose GPUs count; None for all.

        attrs: unit, start, capacity, unassigned, coverage, watermark."""
        query: Query = {
            "kind": kind, "size": size, "half_life": half_life, "measure": measure, "at": _instant(at),
            "start": _instant(start), "cron": cron, "cluster": cluster,
            "gpu_weight": [f"{model}:{weight}" for model, weight in (gpu_weights or {}).items()],
        }  # fmt: skip
        with _valid_answer("/v1/windows"):
            answer = json.loads(self._accountant.get("/v1/windows", query))
            rows = ({"queue": queue, "usage": usage} for queue, usage in sorted(answer["usage"].items()))
            frame = _frame(rows, ("queue",), {"usage": "int64"})
            frame["share"] = frame.usage / answer["capacity"] if answer["capacity"] else float("nan")
            watermark = answer["watermark_ms"]
            frame.attrs.update(
                start=pd.Timestamp(answer["start_ms"], unit="ms", tz="UTC"),
                watermark=None if watermark is None else pd.Timestamp(watermark, unit="ms", tz="UTC"),
                **{name: answer[name] for name in ("unit", "capacity", "unassigned", "coverage")},
            )
        return frame

    def decisions(self, start: Instant | None = None, end: Instant | None = None, limit: int = 1000) -> pd.DataFrame:
        """Return published weights, holds and preemptions, the newest first. `at` is a UTC timestamp."""
        query = {"start": _instant(start), "end": _instant(end), "limit": str(limit)}
        with _valid_answer("/v1/decisions"):
            answer = json.loads(self._accountant.get("/v1/decisions", query))
            rows = [{"cluster": "", **decision} for decision in answer]
            frame = _frame(rows, (), {"value": "float64", "previous": "float64"}, columns=_OF_DECISION)
            instants = [decision["at_ms"] for decision in rows]
            frame.insert(1, "at", pd.to_datetime(instants, unit="ms", utc=True))
        return frame

    def _pages(self, path: str, query: Query) -> list[dict[str, Any]]:
        """Return all pages of an answer, which are at least one."""
        pages: list[dict[str, Any]] = []
        while not pages or pages[-1]["next_page"] is not None:
            following = {"page": pages[-1]["next_page"]} if pages else {}
            pages.append(json.loads(self._accountant.get(path, {**query, **following})))
        return pages


@contextlib.contextmanager
def _valid_answer(path: str) -> Iterator[None]:
    """Raise Unanswered if the block fails because the answer does not have the form that this release knows."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise Unanswered(
            f"{path}: not the answer of an accountant of this release: check the address and the accountant's release"
        ) from error


def _with_decimals(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a record in which the fields with these names are Decimal; null stays None."""
    return {**record} | {name: None if record[name] is None else Decimal(record[name]) for name in names}


def _grouped(
    start: Instant | None,
    end: Instant | None,
    by: Sequence[str],
    where: Mapping[str, str | Sequence[str]] | None,
    timezone: str | None,
) -> dict[str, Any]:
    filters = {f"where.{name}": values for name, values in (where or {}).items()}
    return {"start": _instant(start), "end": _instant(end), "by": list(by), "timezone": timezone, **filters}


def _instant(value: Instant | None) -> str | None:
    """Convert a point in time to the API's form. Raises ValueError for a datetime without a time zone."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone: give one, for example tzinfo=datetime.UTC")
        return str(round(value.timestamp() * 1000))
    return value.isoformat() if isinstance(value, date) else str(index(value))


def _frame(
    rows: Iterable[Mapping[str, object]],
    by: Sequence[str],
    types: Mapping[str, str],
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Return a frame with typed columns, which has them even without rows.

    by: text columns, before those of `types`.
    columns: the names and the order of all columns; None for those of `by` and `types`."""
    names = [*by, *types] if columns is None else list(columns)
    frame = pd.DataFrame.from_records([[row[name] for name in names] for row in rows], columns=names)
    return frame.astype({**dict.fromkeys(by, "str"), **types})
