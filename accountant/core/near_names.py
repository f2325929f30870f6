"""The names that are most like a mistyped one, as the end of an error message. Pure."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from gputally.base.untrusted_text import escaped

_NAMED = 3
"""Names in an error at most."""
_LONGEST = 200
"""Characters of a name in an error."""
_ALIKE = 0.5
"""How alike a name has to be, from 0 to 1."""


def nearest(name: str, known: Collection[str]) -> str:
    """`; did you mean vision or speech?`, or `; known are …`; "" where nothing is known."""
    folded = {each.casefold(): each for each in sorted(known) if each}
    alike = [folded[each] for each in get_close_matches(name.casefold(), folded, _NAMED, _ALIKE)]
    if alike:
        return f"; did you mean {' or '.join(shown(each) for each in alike)}?"
    if not folded:
        return ""
    few = sorted(folded.values())[:_NAMED]
    more = f" and {len(folded) - len(few):,} more" if len(folded) > len(few) else ""
    return f"; known are {', '.join(shown(each) for each in few)}{more}"


def shown(name: str) -> str:
    """A name in an error: quoted, short, without characters that steer a terminal."""
    return f"'{escaped(name[:_LONGEST])}'"
