"""Pages that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gputally.base.clock import VirtualClock
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.web.browser_sessions import Login, PageContext, site_in
from tests.fairshare.web.controller_pages import Stage, stage
from tests.fakes.provider import provider


@pytest.fixture(scope="module")
def open_stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Read-only pages without sign-in."""
    return stage(tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return stage(tmp_path_factory.mktemp("guarded"), guarded=True, writable=True)


@pytest.fixture(scope="module")
def login() -> Iterator[Login]:
    clock = VirtualClock(NOW_MS)
    with provider(clock) as running:
        yield running, clock


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, login: Login) -> PageContext:
    return site_in(tmp_path_factory.mktemp("site"), *login)


@pytest.fixture
def context(replicas: PageContext) -> PageContext:
    """The replicas, with a provider that sends correct claims."""
    replicas.login.spoil, replicas.login.refuse, replicas.login.secret = {}, False, "client-s3cret"
    replicas.login.claims = {"sub": "1", "email": "ann@example.com", "email_verified": True, "groups": []}
    return replicas
