"""Removes what no version of a lake needs, with a clock that is three days ahead: every file is old enough for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from accountant.core.settings import Lake
from accountant.lake.iceberg_catalog import Catalogue
from gputally.base.units import MS_PER_DAY


def later_ms() -> int:
    return time.time_ns() // 1_000_000 + 3 * MS_PER_DAY


def main(arguments: Sequence[str]) -> int:
    """arguments: the warehouse."""
    with closing(Catalogue.connect(Lake(warehouse=arguments[0]))) as catalogue:
        catalogue.remove_old_versions(later_ms(), 3_600)
    return 0
