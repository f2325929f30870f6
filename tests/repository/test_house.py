"""What scripts.house counts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import house


def test_lines_without_code_are_not_counted() -> None:
    source = (
        '"""Words.\n\nMore words."""\n\n# A comment.\nx = (1,\n     2)\n\ndef f():\n    "Words."\n    return """a\nb"""'
    )
    assert house.code_lines(source) == 5


def test_a_plug_in_s_own_folder_may_name_it() -> None:
    sources = {"a/kueue/plan.py": "KUEUE = 1", "a/core.py": "# Kueue", "a/kubelet.py": "cubes", "b.py": "x.runai"}
    assert house.naming("kueue", sources) == ["a/core.py"]
    assert house.naming("run:ai", sources) == ["b.py"]


def test_inherited_methods_read_a_ledger_and_writing_ones_do_not() -> None:
    source = (
        "class Base:\n def usage(self): ...\n def append(self): ...\nclass DuckLedger(Base):\n def window(self): ...\n"
    )
    trees = {"accountant/storage/duckdb_ledger.py": ast.parse(source)}
    assert house.reading_methods(trees) == ["DuckLedger.usage", "DuckLedger.window"]


@pytest.mark.real
def test_an_interval_is_followed_from_the_spool_to_the_report() -> None:
    found = house.walked(Path(house.__file__).parents[1])
    assert isinstance(found, list), found
    assert {"agent.upload.spool", "accountant.composition", "accountant.reports.report_builder"} <= set(found)


def test_a_public_type_has_a_name_of_its_own() -> None:
    sources = house.modules(Path(house.__file__).parents[1], house.PRODUCTION)
    assert house.repeated_types({path: ast.parse(source) for path, source in sources.items()}) == []
