"""How hard properties look that do not say it themselves (tests/effort.py)."""

from __future__ import annotations

from hypothesis import settings

from tests.effort import examples

settings.register_profile("house", max_examples=examples(30, 200))
settings.load_profile("house")
