"""How hard properties look: briefly at every `make test`, long in `make test-real`, which sets GPUTALLY_THOROUGH."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("GPUTALLY_THOROUGH"))


def examples(few: int, many: int) -> int:
    """How many examples to try. Every property runs in both; what is none but asks too carries
    `@pytest.mark.thorough`."""
    return many if THOROUGH else few
