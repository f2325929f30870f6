"""What holds for all tests: how hard properties look (tests/effort.py), and what is loaded and collected.

Every run keeps in pytest's cache which tests it skipped, for want of the shelf (tests/shelf.py) or of a compiler.
`--skipped-in=FOLDER` runs just those that a run in another checkout skipped, so that the pipeline runs no test twice.

What the suite loads stays until its end. It is left out of the collections of cyclic garbage, which would else walk all
of it again and again: a third of the time that loading takes."""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import structlog.testing
from hypothesis import settings

from tests.effort import examples
from tests.fakes.compiled import compiled
from tests.fakes.nvml.library import FakeNvml, build, loaded

settings.register_profile("house", max_examples=examples(30, 200))
settings.load_profile("house")

_REAL = re.compile(r"^pytestmark = \[?pytest\.mark\.real\b", re.MULTILINE)
_GARBAGE = 50_000
"""Objects between collections."""

gc.disable()


def pytest_collection_finish() -> None:
    """All is loaded."""
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules that are `real` as a whole are not even imported where no such test is wanted."""
    if config.getoption("markexpr") != "not real" or collection_path.suffix != ".py":
        return None
    return bool(_REAL.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """Everything that is logged, kept from the terminal; a program run by another test may have set a level."""
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A program that ran in this process has configured logging: its stream is closed when the test is over."""
    root = logging.getLogger()
    level, known = root.level, set(root.handlers)
    configured = structlog.get_config() if structlog.is_configured() else None
    yield
    if configured is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**configured)
    root.setLevel(level)
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler and one not in known]:
        root.removeHandler(handler)


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(build, tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_nvml(fake_nvml_library: Path, tmp_path: Path) -> Iterator[FakeNvml]:
    """The real binding on the fake library."""
    with loaded(fake_nvml_library, tmp_path) as fake:
        yield fake


_SKIPPED = "gputally/skipped"
"""In pytest's cache: tests without their parameters, which may be others where the shelf is there."""
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    checkout: Path | None = config.getoption("--skipped-in")
    if checkout is None:
        return
    wanted = set(json.loads((checkout / ".pytest_cache" / "v" / _SKIPPED).read_text("utf-8")))
    left = [item for item in items if item.nodeid.partition("[")[0] not in wanted]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item.nodeid.partition("[")[0] in wanted]
