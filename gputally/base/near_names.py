"""Shows names in messages, and suggests known names for a mistyped one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from gputally.base.untrusted_text import escaped

_NAMED = 3
"""Maximum number of names that an error suggests."""
_LISTED = 40
"""Maximum number of known names that an error lists if none is alike: a user has no other place to look them up."""
_LONGEST = 200
"""Maximum length of a name in an error, in characters."""
_ALIKE = 0.5
"""Similarity, from 0 to 1, that a suggested name must have."""


def nearest(name: str, known: Collection[str]) -> str:
    """Returns `; did you mean vision or speech?`, or `; known are …` with the known names, or "" if there are none."""
    folded = {each.casefold(): each for each in sorted(known) if each}
    alike = [folded[each] for each in get_close_matches(name.casefold(), folded, _NAMED, _ALIKE)]
    if alike:
        return f"; did you mean {' or '.join(shown(each) for each in alike)}?"
    if not folded:
        return ""
    few = sorted(folded.values())[:_LISTED]
    more = f" and {len(folded) - len(few):,} more" if len(folded) > len(few) else ""
    return f"; known are {', '.join(shown(each) for each in few)}{more}"


def shown(name: str) -> str:
    """A name for an error message: quoted, shortened, without terminal control characters."""
    return f"'{escaped(name[:_LONGEST])}'"


def joined_names(names: Iterable[str], shown: int = 4) -> str:
    """Join at most `shown` names and count the others: `a, b, c, d and 3 more`."""
    all_names = list(names)
    rest = len(all_names) - shown
    return ", ".join(all_names[:shown]) + (f" and {rest} more" if rest > 0 else "")
