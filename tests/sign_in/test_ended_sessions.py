"""An ended session never becomes valid again, at any replica, and what is stored is bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accountant.storage.ended_session_files import SessionFiles
from accountant.storage.folder_or_object_store import in_folder
from fairshare.web.ended_session_stores import SessionConfigMap
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP
from gputally.server.ended_sessions import MOST, EndedSessions, MemoryStore, SessionStore
from gputally.server.tokens_and_grants import AuthorityUnavailable

HOUR_MS = 3_600_000

pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_790_812_800_000)


def in_files(folder: Path) -> SessionStore:
    return SessionFiles(in_folder(folder / "data"))


def in_a_config_map(_: Path) -> SessionStore:
    return SessionConfigMap(MemoryCluster([CONFIG_MAP]), "ns", "sessions")


STORES = pytest.mark.parametrize("make", [in_files, in_a_config_map, lambda _: MemoryStore()])
Make = Callable[[Path], SessionStore]


@STORES
def test_what_one_replica_ends_is_over_at_the_others(clock: VirtualClock, tmp_path: Path, make: Make) -> None:
    store = make(tmp_path)
    one, other = EndedSessions(clock, store), EndedSessions(clock, store)
    for session in ("s1", "s2"):
        one.end(session, clock.wall_ms() + HOUR_MS)
    assert one.ended("s1", clock.wall_ms())
    other.read()
    other.end("s3", clock.wall_ms() + HOUR_MS)
    one.read()
    restarted = EndedSessions(clock, store)
    restarted.read()
    for replica in (one, other, restarted):
        assert [replica.ended(name, clock.wall_ms()) for name in ("s1", "s2", "s3", "s4")] == [True] * 3 + [False]
    clock.advance(HOUR_MS)
    one.end("s5", clock.wall_ms() + HOUR_MS)
    assert len(store.load()) == 1, "no cookie of the others is valid any more"


@STORES
def test_when_too_many_are_ended_everybody_signs_in_again(clock: VirtualClock, tmp_path: Path, make: Make) -> None:
    store = make(tmp_path)
    store.change({f"{number:032x}": clock.wall_ms() + HOUR_MS for number in range(MOST)}, frozenset())
    sessions = EndedSessions(clock, store)
    sessions.read()
    before_ms = clock.wall_ms()
    sessions.end("one more", before_ms + HOUR_MS)
    assert sessions.ended("one more", before_ms)
    assert sessions.ended("a copied one", before_ms)
    assert not sessions.ended("a later one", before_ms + 1)
    assert len(store.load()) == 1
    restarted = EndedSessions(clock, store)
    restarted.read()
    assert restarted.ended("a copied one", before_ms)


def test_a_store_that_fails_is_said_and_the_session_is_over_here(clock: VirtualClock, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder")
    sessions = EndedSessions(clock, in_files(tmp_path))
    with pytest.raises(AuthorityUnavailable):
        sessions.end("s1", clock.wall_ms() + HOUR_MS)
    assert sessions.ended("s1", clock.wall_ms())
    with pytest.raises(AuthorityUnavailable):
        sessions.read()
    (tmp_path / "data").unlink()
    sessions.read()
    assert sessions.stored
    restarted = EndedSessions(clock, in_files(tmp_path))
    restarted.read()
    assert restarted.ended("s1", clock.wall_ms()), "it is over at the others as soon as the store can be written"


@STORES
def test_a_replica_at_which_nobody_signs_out_forgets_what_has_expired(
    clock: VirtualClock, tmp_path: Path, make: Make
) -> None:
    store = make(tmp_path)
    one, quiet = EndedSessions(clock, store), EndedSessions(clock, store)
    one.end("s1", clock.wall_ms() + HOUR_MS)
    quiet.read()
    assert quiet.ended("s1", clock.wall_ms())
    clock.advance(HOUR_MS)
    one.end("s2", clock.wall_ms() + HOUR_MS)
    quiet.read()
    assert not quiet.ended("s1", clock.wall_ms())
    assert quiet.ended("s2", clock.wall_ms())
