"""Sets how many examples hypothesis tries: few in `make test`, many in `make test-real` (GPUTALLY_THOROUGH=1)."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("GPUTALLY_THOROUGH"))


def examples(few: int, many: int) -> int:
    """Return the number of examples to try. Every property runs in both targets. Another test whose number of cases
    depends on this is marked `@pytest.mark.thorough`, so that it runs in both as well."""
    return many if THOROUGH else few
