"""Collections between cycles are short, and no garbage stays for ever."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fairshare.composition import COLLECTIONS_BETWEEN, ShortCollections


class Circle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collections() -> Iterator[ShortCollections]:
    yield ShortCollections()
    gc.unfreeze()


def test_a_collection_looks_only_at_what_came_since_the_last_cycle(collections: ShortCollections) -> None:
    collections.after_cycle()
    pods = [Circle() for _ in range(1_000)]
    collections.after_cycle()
    assert not {id(each) for each in pods} & {id(each) for each in gc.get_objects()}


def test_garbage_of_a_cycle_goes_at_its_end_and_what_became_garbage_later_after_some_cycles(
    collections: ShortCollections,
) -> None:
    early, late = Circle(), Circle()
    seen = [weakref.ref(each) for each in (early, late)]
    del early
    collections.after_cycle()
    assert [each() is None for each in seen] == [True, False]
    del late
    for _ in range(COLLECTIONS_BETWEEN):
        collections.after_cycle()
    assert [each() is None for each in seen] == [True, True]
