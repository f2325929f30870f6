"""Run:ai's kinds beside those of the API server."""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

import fairshare
from fairshare.schedulers.runai.adapter import NODE_POOL, UNITS
from gputally.kubernetes.objects import Kind
from tests.fairshare.scheduler_kinds import KINDS


def test_every_kind_that_the_product_names_is_one_it_connects_with() -> None:
    """Run:ai's kinds belong to its own API, not to the API server."""
    names = [found.name for found in walk_packages(fairshare.__path__, "fairshare.") if "__main__" not in found.name]
    named = {value for name in names for value in vars(import_module(name)).values() if isinstance(value, Kind)}
    assert named - set(KINDS) == {*UNITS, NODE_POOL}
