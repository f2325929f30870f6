"""Engines of other packages: what is broken, slow or hostile is named, and fails its query alone."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from sqlglot import exp

from accountant.__main__ import main
from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake
from accountant.lake.engines.guard import GuardedEngine, checked, open_engine
from accountant.lake.engines.protocol import SEAM, EnginePlugin
from gputally.base.plugins import OURS, BrokenPlugin, plugins, usable
from tests.plugins.installed import install

_PLUGIN = """
import pyarrow as pa
from accountant.lake.engines.protocol import EnginePlugin

class Mine:
    def namespaces(self):
        {namespaces}
    def query(self, question, namespace, days):
        {query}
    def close(self):
        {close}

def open_(lake, url):
    {opening}

ENGINE = EnginePlugin({name!r}, open_, {urls!r}, reaches="nothing", page="page")
"""
QUESTION = exp.select("day", exp.func("sum", exp.column("busy_us")).as_("busy")).from_("days").group_by("day")
NAMESPACE = "gputally_prod"
ANSWER = "return pa.table({'day': ['2026-10-01'], 'busy': [1]})"


def plugin(
    namespaces: str = "return ['gputally_b', 'gputally_a']", query: str = ANSWER, close: str = "pass",
    opening: str = "return Mine()", name: str = "mine", urls: str = "mine://…",
) -> str:  # fmt: skip
    return _PLUGIN.format(namespaces=namespaces, query=query, close=close, opening=opening, name=name, urls=urls)


@pytest.fixture
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that installs an engine, for commands of a new process too."""

    def call(text: str) -> None:
        install(folder, "other-package", {SEAM: {"mine": "other_module:ENGINE"}}, other_module=text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "accountant.cli.fleet_commands", raising=False)

    return call


def mine() -> GuardedEngine:
    found = open_engine("mine", Lake(warehouse="/nowhere"), "mine://x")
    assert isinstance(found, GuardedEngine)
    return found


def test_an_engine_of_another_package_answers(installed: Callable[[str], None]) -> None:
    installed(plugin())
    engine = mine()
    assert engine.namespaces() == ["gputally_a", "gputally_b"]
    assert engine.query(QUESTION, NAMESPACE).to_pylist() == [{"day": "2026-10-01", "busy": 1}]
    engine.close()


@pytest.mark.parametrize(
    "text",
    [
        plugin(opening="raise SystemExit(3)"), plugin(opening="raise RuntimeError('no\\nlicence')"),
        plugin(namespaces="return ['information_schema']"), plugin(namespaces="return None"),
        plugin(namespaces="return ['gputally_a', 7]"), plugin(query="1 / 0"), plugin(query="return None"),
        plugin(query="raise KeyboardInterrupt"), plugin(query="return pa.table({'day': ['x']})"),
        plugin(query="return pa.table({'day': ['x'], 'busy': [1.0]})"),
        plugin(query="return pa.table({'busy': [1], 'day': ['x']})"),
        plugin(query="question.set('expressions', []); return pa.table({})"), plugin(close="exit(3)"),
        plugin(opening="return None"),
    ],
)  # fmt: skip
def test_an_engine_that_fails_is_named_with_its_package(installed: Callable[[str], None], text: str) -> None:
    installed(text)
    with pytest.raises(LakeUnavailable, match="mine of the package other-package") as caught:
        use()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["namespaces", "query", "close"])
def test_an_engine_without_a_method_is_refused_before_a_query(installed: Callable[[str], None], method: str) -> None:
    installed(plugin().replace(f"def {method}(", "def other("))
    with pytest.raises(LakeUnavailable, match=f"mine of the package other-package .*{method}"):
        mine()


def test_an_engine_without_addresses_refuses_one(
    installed: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(plugin(urls=""))
    assert main(["fleet", "usage", "--engine", "mine", "--engine-url", "http://x", "--lake", str(tmp_path)]) == 1
    assert "--engine-url" in capsys.readouterr().err


def use() -> None:
    engine = mine()
    engine.namespaces()
    engine.query(QUESTION, NAMESPACE)
    engine.close()


def test_a_query_that_hangs_is_given_up_and_no_further_one_begins() -> None:
    goes_on, asked = threading.Event(), []

    class Hanging:
        def namespaces(self) -> list[str]:
            asked.append(1)
            goes_on.wait()
            return []

        def query(self, question: exp.Select, namespace: str, days: object = None) -> pa.Table:
            raise AssertionError

        def close(self) -> None: ...

    engine = GuardedEngine(Hanging(), "mine", most_s=0.01)
    for _ in range(3):
        with pytest.raises(LakeUnavailable, match="mine"):
            engine.namespaces()
    assert len(asked) == 1
    goes_on.set()


def test_texts_of_any_form_are_plain_texts() -> None:
    texts = pa.array(["a", None]), pa.array(["a", None], pa.large_string()), pa.array(["a", None]).dictionary_encode()
    answer = pa.table(dict(zip("abc", texts, strict=True)))
    found = checked(answer, exp.select("a", "b", "c").from_("days"))
    assert set(found.schema.types) == {pa.string()}
    assert found.column("c").to_pylist() == ["a", None]


@pytest.mark.parametrize(
    "text", ["raise ValueError('no licence')", "ENGINE = 1", plugin(name="Mine"), plugin(urls="a\x1b[2J")]
)
def test_an_engine_that_cannot_be_used_is_left_out_and_who_names_it_is_told_why(
    installed: Callable[[str], None], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(text)
    assert {one.package for one in plugins(SEAM, EnginePlugin) if one.manifest is not None} <= {OURS}
    assert "mine" not in usable(SEAM, EnginePlugin)
    with pytest.raises(BrokenPlugin, match="other-package"):
        mine()
    assert main(["fleet", "usage", "--engine", "mine", "--lake", str(tmp_path)]) == 1
    assert "other-package" in capsys.readouterr().err
    assert main(["fleet", "usage", "--help"]) == 0
    assert "mine" not in capsys.readouterr().out
    assert main(["fleet", "usage", "--engine", "your", "--lake", str(tmp_path)]) == 1
    assert "mine" not in capsys.readouterr().err


def test_the_help_names_the_engines_and_their_addresses(
    installed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed(plugin())
    assert main(["fleet", "usage", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(engine.urls in told for engine in usable(SEAM, EnginePlugin).values())
    assert "mine://…" in told
