"""Plug-ins are found by entry points. One that is broken, hostile or doubled is named and left out."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from gputally.__main__ import main
from gputally.base import plugins as registry
from gputally.base.plugins import OURS, NoPlugin, TakesTooLong, named, plugins, preferred, usable, within
from gputally.plugin_list import installed
from tests.plugins.installed import install

if TYPE_CHECKING:
    from gputally.base.clock import Clock as Unseen

ROOT = Path(__file__).parents[2]
SEAM = "tests.seam"


@dataclass(frozen=True)
class Manifest:
    name: str
    parts: tuple[str, ...] = ()
    open: Callable[[Unseen], object] | None = None


def good(name: str) -> str:
    return f"from tests.plugins.test_registry import Manifest\nPLUGIN = Manifest({name!r})\n"


def test_a_plugin_is_found_by_its_name(folder: Path) -> None:
    install(folder, "some-package", {SEAM: {"one": "some_module:PLUGIN"}}, some_module=good("one"))
    (found,) = plugins(SEAM, Manifest)
    assert (found.name, found.package, found.version, found.fault) == ("one", "some-package", "1.2", "")
    assert named(SEAM, Manifest, "one") == Manifest("one")


@pytest.mark.parametrize(
    ("installed", "chosen"), [(["a", "pdf", "html"], "pdf"), (["a", "html"], "html"), (["b", "a"], "b"), ([], "pdf")]
)
def test_a_default_follows_what_is_installed(installed: list[str], chosen: str) -> None:
    assert preferred(installed, "pdf", "html") == chosen


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt", good("bad").replace(")", ", parts=('x', 1))"),
        good("bad").replace(")", ", open=1)"),
        "raise ValueError('no licence')", "import nothing_of_this_name", "import sys; sys.exit(3)", "PLUGIN = 1",
        "def", good("another"), "class Loop:\n    def __getattr__(self, name): return self\nPLUGIN = Loop()",
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_and_left_out(folder: Path, text: str) -> None:
    install(folder, "bad-package", {SEAM: {"bad": "bad_module:PLUGIN"}}, bad_module=text)
    install(folder, "good-package", {SEAM: {"good": "good_module:PLUGIN"}}, good_module=good("good"))
    assert usable(SEAM, Manifest) == {"good": Manifest("good")}
    assert [one.package for one in plugins(SEAM, Manifest) if one.fault] == ["bad-package"]
    with pytest.raises(NoPlugin, match="bad-package"):
        named(SEAM, Manifest, "bad")
    with pytest.raises(NoPlugin, match="good"):
        named(SEAM, Manifest, "god")


def test_a_manifest_that_fails_takes_its_module_along_and_both_plugins_say_so(folder: Path) -> None:
    text = good("one") + "OTHER = 1 / 0"
    points = {SEAM: {"one": "some_module:PLUGIN", "two": "some_module:OTHER"}}
    install(folder, "some-package", points, some_module=text)
    assert all("module some_module" in one.fault for one in plugins(SEAM, Manifest))


def test_the_manifests_of_all_seams_take_names_of_one_form() -> None:
    found = {seam: one.manifest for seam, one in installed() if seam != "gputally.assistant"}
    assert len(found) == 7
    for manifest in found.values():
        own = msgspec.structs.replace if isinstance(manifest, msgspec.Struct) else replace
        assert own(manifest, name="rocket-chat.2").name == "rocket-chat.2"
        for name in ("rocket_chat", "Rocket", "2nd", "a--b", "a-", "-a", "", "a b", "a\n", "x" * 33):
            with pytest.raises(ValueError, match="name of a plug-in"):
                own(manifest, name=name)


def test_a_name_has_one_owner(folder: Path) -> None:
    install(folder, "b-package", {SEAM: {"one": "b_module:PLUGIN"}}, b_module=good("one"))
    install(folder, "a-package", {SEAM: {"one": "a_module:PLUGIN"}}, a_module=good("one"))
    first, second = plugins(SEAM, Manifest)
    assert (first.package, first.fault) == ("a-package", "")
    assert second.package == "b-package"
    assert "a-package" in second.fault


def test_nobody_takes_the_name_of_one_of_ours(folder: Path) -> None:
    from accountant.exports.protocol import SEAM as EXPORTS
    from accountant.exports.protocol import ExportPlugin

    own = next(one for one in plugins(EXPORTS, ExportPlugin) if one.package == OURS)
    install(folder, "aaa", {EXPORTS: {own.name: "aaa_module:EXPORT"}}, aaa_module="EXPORT = 1")
    assert named(EXPORTS, ExportPlugin, own.name) is own.manifest


def test_a_channel_whose_settings_fail_refuses_its_messages(folder: Path) -> None:
    from accountant.channels.protocol import Message, Refused
    from accountant.notifications.subscriptions import destination

    text = """
from accountant.channels.protocol import ChannelPlugin
from gputally.server.config_loading import Model
from pydantic import field_validator
class Own(Model):
    to: str
    _fail = field_validator("to")(lambda text: {}[text])
CHANNEL = ChannelPlugin("own", Own, lambda settings: None, False, "nothing", "page")
"""
    install(folder, "own", {"gputally.channels": {"own": "own_module:CHANNEL"}}, own_module=text)
    with pytest.raises(Refused, match="own"):
        destination({"own": {"to": "x"}}).open().deliver(Message("k", 0, "subject", "text"))


def test_the_command_lists_plugins_and_fails_if_one_is_broken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--output", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {(one["seam"], one["name"]) for one in listed} == {(seam, name) for seam in points for name in points[seam]}
    assert all(one["reaches"] and one["page"] for one in listed)
    install(folder, "bad-package", {"gputally.channels": {"bad": "bad_module:PLUGIN"}}, bad_module="1 / 0")
    registry._entry_points.cache_clear()
    registry._listed.cache_clear()
    assert main(["plugins", "--output", "csv"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_an_image_without_the_libraries_of_another_program_lists_its_own_plugins() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('httpx2', 'pydantic', 'typer'))\n"
        "from gputally.__main__ import main; sys.exit(main(['plugins', '-o', 'json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seams = {one["seam"] for one in json.loads(done.stdout)}
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {seam for seam in ("gputally.gpu_readers", "gputally.schedulers") if points.get(seam)} <= seams
    assert not seams & {"gputally.channels", "gputally.histories"}


def test_code_that_hangs_is_left_behind() -> None:
    go = threading.Event()
    with pytest.raises(TakesTooLong) as caught:
        within(0.05, go.wait)
    assert not caught.value.done.is_set()
    go.set()
    assert caught.value.done.wait(30)


def test_code_that_ends_gives_its_result_or_raises_its_error() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    assert within(30, lambda: 7) == 7
    with pytest.raises(TimeoutError, match="its own"):
        within(30, fail)
