"""The tables of docs/conditions.md whose rows depend on the scheduler, from the reasons beside each adapter
(`Adapter.reasons`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from fairshare.controller.weight_writer import FIELD_NOT_OURS
from fairshare.core.queues_and_weights import ConditionReason
from fairshare.targets.installed import adapters
from gputally.base.plugins import OURS, plugins
from gputally.kubernetes.scheduler_plugins import SEAM, SchedulerPlugin

_HEAD = "| Target | Status | Reason | Cause | What to do |\n|---|---|---|---|---|"
_BEGIN, _END = "<!-- {type}: computed by scripts/reference_pages.py -->", "<!-- end of what is computed -->"
_BLOCK = re.compile(_BEGIN.format(type=r"(\w+)") + f".*?{_END}", re.DOTALL)


def reasons() -> Mapping[str, Sequence[ConditionReason]]:
    """Return the reasons of the conditions of all targets, and of each scheduler of this package, by title."""
    ours = {one.name for one in plugins(SEAM, SchedulerPlugin) if one.package == OURS}
    found = {str(each.settings.model_config["title"]): each.reasons for each in adapters() if each.name in ours}
    return {"all": (FIELD_NOT_OURS,), **found}


def page(text: str, told: Mapping[str, Sequence[ConditionReason]]) -> str:
    """Return the page docs/conditions.md with new tables. text: the present page.

    Raises ValueError for a type of condition that has no table."""
    made = {block[1] for block in _BLOCK.finditer(text)}
    if unknown := {one.type for several in told.values() for one in several} - made:
        raise ValueError(f"docs/conditions.md has no table of {', '.join(sorted(unknown))}")
    return _BLOCK.sub(lambda block: _block(block[1], told), text)


def _block(kind: str, told: Mapping[str, Sequence[ConditionReason]]) -> str:
    titles: dict[ConditionReason, list[str]] = {}
    for title, several in told.items():
        for one in several:
            if one.type == kind:
                titles.setdefault(one, []).append(title)
    rows = [_row(one, names) for one, names in titles.items()]
    return "\n".join([_BEGIN.format(type=kind) + "\n", _HEAD, *rows, "", _END])


def _row(one: ConditionReason, titles: Iterable[str]) -> str:
    return f"| {', '.join(titles)} | {one.status} | `{one.reason}` | {one.cause} | {one.cure} |"
