"""How hard properties look: briefly at every `make test`, long in `make test-real`, which sets GPUTALLY_THOROUGH."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("GPUTALLY_THOROUGH"))


def examples(few: int, many: int) -> int:
    """How many examples to try. A test that asks carries `@pytest.mark.thorough`, so that it runs in both."""
    return many if THOROUGH else few
