"""Says line by line what a version of the price book or of the policy changed."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import unified_diff
from typing import Any

import yaml

from accountant.bookkeeping.price_book_versions import BookVersion
from accountant.ledger.journal import Act
from accountant.wire.policy_models import PolicyVersion

MOST_LINES = 1_000
"""Lines of a difference that a page shows."""


def difference_of(act: Act, books: Sequence[BookVersion], policies: Sequence[PolicyVersion]) -> tuple[str, ...] | None:
    """The lines of the unified difference from the version before; of the first version all of its lines. None for an
    act that puts no version in force, and for a version that is not known any more.

    books, policies: all versions, oldest first."""
    if act.kind == "prices":
        place = next((place for place, one in enumerate(books) if one.number == act.number), None)
        versions: list[tuple[str, Any]] = [(one.version, one.book) for one in books]
    elif act.kind == "policy":
        after = [place for place, one in enumerate(policies) if one.version == act.subject]
        place = next((place for place in after if policies[place].effective_ms >= act.at_ms), None)
        versions = [(one.version, one.policy) for one in policies]
    else:
        return None
    if place is None:
        return None
    name, model = versions[place]
    was_name, was = versions[place - 1] if place else ("", None)
    lines = unified_diff(_lines(was), _lines(model), was_name or "nothing", name, lineterm="")
    return tuple(lines)


def _lines(model: Any) -> list[str]:
    """A model as the lines of a YAML file, without what has its default."""
    if model is None:
        return []
    plain = model.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100).splitlines()
