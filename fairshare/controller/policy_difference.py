"""Shows what a change of the policy changes, for the log, the pages and the decision log.

The comparison is that of the settings, with defaults and with queues by name, and not of the files' texts: every
replica and every way to change the file (version control, a ConfigMap, the form) gives the same lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import structlog
from pydantic import JsonValue

from accountant.wire.policy_models import Decision, Policy
from fairshare.controller.cycle_report import EVERYTHING
from gputally.base.background_tasks import error_summary

MOST_LOGGED: Final = 100
"""Largest number of changed values that the log lists."""
MOST_RECORDED: Final = 500
"""Largest number of changed values in a decision."""
_LONGEST: Final = 300
"""Characters of a line."""
_DURATIONS: Final = frozenset(
    {
        "bounds.interval", "max_staleness",
        "preemption.cool_down", "preemption.min_runtime", "preemption.wait", "turns.min_turn", "window.calc_period",
        "window.half_life", "window.size",
    }
)  # fmt: skip
"""The paths of the settings in seconds that are shown as a policy file writes them."""


def changes(before: Policy, after: Policy) -> tuple[tuple[str, str, str], ...]:
    """Return (path, value before, value after) of every changed value, with defaults, and queues by name."""
    return tuple(_changes("", _plain(before), _plain(after)))


def changed_texts(before: Policy | None, after: Policy) -> tuple[str, ...]:
    """Return the changes as lines for the log. before: None if the policy before was faulty, which gives no lines. A
    defect is logged, and named instead of the changes: the new policy comes into force whether or not they can be
    shown."""
    found, fault = _shown(before, after)
    if fault:
        return (fault,)
    lines = [_line("", f"{path}: {old or 'none'} -> {new}") for path, old, new in found[:MOST_LOGGED]]
    more = len(found) - MOST_LOGGED
    return (*lines, *([f"and {more} more"] if more > 0 else []))


def policy_decision(before: Policy | None, after: Policy, at_ms: int, saved_by: str = "", why: str = "") -> Decision:
    """Return the record of another policy with the difference, as lines of a unified diff without context.

    before: the policy before; None if there was none, or none that can be read.
    saved_by: the person who saved the policy by the form, before it comes into force; "" for a policy that the
        controller puts into force.
    why: the reason that this person gave."""
    found, fault = _shown(before, after)
    now, was = after.version(), before.version() if before is not None else ""
    lines: list[JsonValue] = []
    if before is not None and not fault:
        lines = [f"--- policy {was}", f"+++ policy {now}"]
        for path, old, new in found[:MOST_RECORDED]:
            lines += [_line("-", f"{path}: {old}")] if old else []
            lines.append(_line("+", f"{path}: {new}"))
    count = "one value differs" if len(found) == 1 else f"{len(found)} values differ"
    what = fault or (count if before is not None else "there was no policy that can be read")
    act = f"saved by {saved_by} from the pages" if saved_by else "put into force"
    return Decision(
        id=f"{now}/{at_ms}/policy{'/saved' if saved_by else ''}",
        at_ms=at_ms,
        kind="policy",
        target=EVERYTHING,
        subject=EVERYTHING,
        mode="enforce",
        reason=f"policy {now} {act}{f', in place of {was}' if was else ''}: {what}{f'; {why}' if why else ''}",
        policy_version=now,
        inputs={"before": was, "by": saved_by, "difference": lines, "more": max(0, len(found) - MOST_RECORDED)},
    )


def _shown(before: Policy | None, after: Policy) -> tuple[tuple[tuple[str, str, str], ...], str]:
    """Return the changes, and the defect that prevents their comparison; "" if there is none."""
    try:
        return changes(before, after) if before is not None else (), ""
    except Exception as error:  # noqa: BLE001 - a policy is in force also if its difference cannot be shown
        structlog.get_logger("fairshare").error("policy_not_compared", exc_info=error)
        return (), f"the difference cannot be shown: {error_summary(error)}"


def _line(sign: str, text: str) -> str:
    """Return a text of users as one line of limited length."""
    text = " ".join(text.splitlines())
    return sign + (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def _plain(policy: Policy) -> dict[str, Any]:
    plain = policy.model_dump(mode="json", by_alias=True)
    plain["queues"] = {queue.name: queue.model_dump(mode="json", exclude={"name"}) for queue in policy.queues}
    return plain


def _changes(at: str, before: Any, after: Any) -> Iterator[tuple[str, str, str]]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            yield from _changes(f"{at}.{key}" if at else str(key), before.get(key), after.get(key))
    elif isinstance(after, Mapping) and before is None:
        yield at, "", "new"
    elif isinstance(before, Mapping) and after is None:
        yield at, "there", "gone"
    else:
        texts = [
            duration_text(value) if at in _DURATIONS and isinstance(value, int) else text_of(value)
            for value in (before, after)
        ]
        yield at, texts[0] or "none", texts[1] or "none"


def text_of(value: Any) -> str:
    """Return a plain value as text: "" for None, `true`, `3` for 3.0, `a, b` for a list."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def duration_text(seconds: int) -> str:
    """Return a duration as a policy file writes it, in whole days, hours, minutes or seconds: `7d`, `90m`."""
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
