"""The house's own import contracts catch what they are there to catch."""

from __future__ import annotations

import sys
from pathlib import Path

import grimp
import pytest

from scripts.import_contracts import PublishedLanguage, SoleImporter


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> grimp.ImportGraph:
    """Two small stages: `upper.bad` reaches into `lower.private`, `lower.private` imports `json`."""
    files = {
        "lower_stage/__init__.py": "",
        "lower_stage/wire.py": "",
        "lower_stage/private.py": "import json\n",
        "upper_stage/__init__.py": "",
        "upper_stage/good.py": "from lower_stage import wire\n",
        "upper_stage/bad.py": "import json\nfrom lower_stage.private import json as j\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        return grimp.build_graph("lower_stage", "upper_stage", include_external_packages=True, cache_dir=None)
    finally:
        for name in [n for n in sys.modules if n.startswith(("lower_stage", "upper_stage"))]:
            del sys.modules[name]


def _contract(kind: type, **options: object) -> PublishedLanguage | SoleImporter:
    return kind(name="test", session_options={}, contract_options=options)


def test_a_private_module_of_another_stage_is_found(graph: grimp.ImportGraph) -> None:
    contract = _contract(PublishedLanguage, importer="upper_stage", stage="lower_stage", published=["lower_stage.wire"])
    check = contract.check(graph, verbose=False)
    assert not check.kept
    assert check.metadata["found"] == ["upper_stage.bad -> lower_stage.private (l.2)"]


def test_the_published_language_is_allowed(graph: grimp.ImportGraph) -> None:
    contract = _contract(
        PublishedLanguage,
        importer="upper_stage",
        stage="lower_stage",
        published=["lower_stage.wire", "lower_stage.private"],
    )
    assert contract.check(graph, verbose=False).kept


def test_a_second_importer_is_found(graph: grimp.ImportGraph) -> None:
    contract = _contract(SoleImporter, package="json", modules=["lower_stage.private"])
    assert contract.check(graph, verbose=False).metadata["found"] == ["upper_stage.bad -> json (l.1)"]


def test_the_sole_importer_is_allowed(graph: grimp.ImportGraph) -> None:
    contract = _contract(SoleImporter, package="json", modules=["lower_stage", "upper_stage.bad"])
    assert contract.check(graph, verbose=False).kept
