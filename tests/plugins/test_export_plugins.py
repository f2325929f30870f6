"""Exports of other packages: their files come from another process, and what is broken, slow or hostile is named."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accountant.core.errors import CannotRender
from accountant.exports import rendering_process
from accountant.exports.protocol import exports
from gputally.base.plugins import BrokenPlugin
from tests.billing.usage_rows import held
from tests.exports.format_cases import TEXT
from tests.plugins.installed import install
from tests.reports import sample_month

_PLUGIN = """
from accountant.exports.protocol import ExportPlugin

def write(report, stream):
    {body}

EXPORT = ExportPlugin("mine", {title!r}, {media_type!r}, {suffix!r}, write, reaches="nothing", page="page")
"""


def plugin(
    body: str = "stream.write(b'x')", title: str = "Mine", media_type: str = "text/plain", suffix: str = "mine"
) -> str:
    return _PLUGIN.format(body=body, title=title, media_type=media_type, suffix=suffix)


def installed(folder: Path, text: str) -> None:
    install(folder, "other-package", {"gputally.exports": {"mine": "other_module:EXPORT"}}, other_module=text)
    importlib.invalidate_caches()


def rendered(most_s: float = 60) -> bytes:
    return rendering_process.render("mine", sample_month.october(held("2026-10-01", "2026-10-02")), most_s)


def test_an_export_of_another_package_writes_in_another_process(folder: Path) -> None:
    installed(folder, plugin("import os; stream.write(str(os.getpid()).encode())"))
    assert int(rendered()) != os.getpid()
    assert exports()["mine"].suffix == "mine"


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(3)", "stream.close()",
        "from accountant.core.errors import CannotRender; raise CannotRender('no licence')",
        "class Fault(Exception):\n        def __reduce__(self): return (1 / 0,)\n    raise Fault",
    ],
)  # fmt: skip
def test_an_export_that_fails_is_named_with_its_package(folder: Path, body: str) -> None:
    installed(folder, plugin(body))
    with pytest.raises(CannotRender, match="other-package") as caught:
        rendered()
    assert "\n" not in str(caught.value)


def test_an_export_that_breaks_its_process_breaks_no_other(folder: Path) -> None:
    installed(folder, plugin("import os; os.write(1, b'no answer\\n')"))
    with pytest.raises(CannotRender, match="mine"):
        rendered()


def test_an_export_that_hangs_is_ended(folder: Path) -> None:
    installed(folder, plugin("import time; time.sleep(600)"))
    with pytest.raises(CannotRender, match="mine"):
        rendered(0.5)


def test_an_export_that_fills_the_memory_is_ended(folder: Path) -> None:
    installed(folder, plugin("stream.write(bytes(4 << 30))"))
    with pytest.raises(CannotRender, match="mine"):
        rendered()


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('no licence')", "EXPORT = 1", plugin(title=""), plugin(title="a\nb"), plugin(suffix="../x"),
        plugin(suffix="x" * 99), plugin(media_type="text/plain\r\nSet-Cookie: a=b"),
    ],
)  # fmt: skip
def test_an_export_that_cannot_be_used_is_left_out_with_the_reason(folder: Path, text: str) -> None:
    installed(folder, text)
    assert "mine" not in exports()
    assert TEXT.name in exports()
    with pytest.raises(BrokenPlugin, match="other-package"):
        rendered()


def test_no_format_needs_its_library_before_it_writes(folder: Path) -> None:
    """Help and completion load every manifest."""
    installed(folder, plugin())
    heavy = {"openpyxl", "pyarrow", "weasyprint", "duckdb"}
    code = (
        f"import sys; from accountant.exports.protocol import exports; exports(); print({heavy} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
