"""Configures the whole suite: hypothesis, garbage collection, which modules are imported, and `--skipped-in`.

Every run records in pytest's cache which tests it skipped, because shared files (tests/shared_files.py) or a compiler
are missing. `--skipped-in=FOLDER` runs only the tests that a run in another checkout skipped, so that the pipeline runs
no test twice.

Imported modules stay loaded until the end of the run. They are excluded from garbage collection, which would otherwise
scan them again and again and take a third of the time of the imports."""

from __future__ import annotations

import functools
import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import structlog.testing
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings
from starlette.testclient import TestClient

from tests.fakes.compiled import compiled
from tests.fakes.nvml.library import FakeNvml, build, loaded
from tests.hypothesis_examples import examples
from tests.restored_logging import restored_logging

# How long an example or its generation takes depends on the machine.
settings.register_profile(
    "house", max_examples=examples(30, 200), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")

_REAL = re.compile(r"^pytestmark = \[?pytest\.mark\.real\b", re.MULTILINE)
_GARBAGE = 50_000
"""Number of new objects that starts a garbage collection."""

gc.disable()


def pytest_collection_finish() -> None:
    """Exclude everything that is loaded from garbage collection."""
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of modules in which every test is `real` if no such test was requested, and of modules without a
    wanted test."""
    if collection_path.suffix != ".py":
        return None
    wanted = _skipped_elsewhere(config)
    if wanted is not None:
        module = collection_path.relative_to(config.rootpath).as_posix()
        if not any(test.partition("::")[0] == module for test in wanted):
            return True
    if config.getoption("markexpr") != "not real":
        return None
    return bool(_REAL.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """The captured log. Resets the log level that a program in an earlier test may have set."""
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Restore the configuration of logging, which a program that runs in a test changes."""
    with restored_logging():
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_event_loop() -> Iterator[None]:
    """Let the requests of all test clients run in one event loop, as those to a server do. Otherwise each starts a loop
    of its own, and each document a process, which imports the accountant."""
    with start_blocking_portal() as portal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(TestClient, "portal", portal)
        yield


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(build, tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_nvml(fake_nvml_library: Path, tmp_path: Path) -> Iterator[FakeNvml]:
    """The real NVML binding with the fake library loaded."""
    with loaded(fake_nvml_library, tmp_path) as fake:
        yield fake


_SKIPPED = "gputally/skipped"
"""Key in pytest's cache of the skipped tests, without their parameters, which depend on the shared files."""
_skipped: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped-in", type=Path, help="run only the tests that a run in this checkout skipped")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.add(report.nodeid.partition("[")[0])


def pytest_sessionfinish(session: pytest.Session) -> None:
    cache = getattr(session.config, "cache", None)  # none with `-p no:cacheprovider`
    if cache is not None and not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        cache.set(_SKIPPED, sorted(_skipped))


def _skipped_elsewhere(config: pytest.Config) -> frozenset[str] | None:
    """The tests that the checkout of `--skipped-in` skipped, without their parameters; None without that option."""
    checkout: Path | None = config.getoption("--skipped-in")
    return None if checkout is None else _skipped_in(checkout)


@functools.cache
def _skipped_in(checkout: Path) -> frozenset[str]:
    return frozenset(json.loads((checkout / ".pytest_cache" / "v" / _SKIPPED).read_text("utf-8")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = _skipped_elsewhere(config)
    if wanted is None:
        return
    left = [item for item in items if item.nodeid.partition("[")[0] not in wanted]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item.nodeid.partition("[")[0] in wanted]
