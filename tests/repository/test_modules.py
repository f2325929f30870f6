"""Module names in docstrings and comments exist, and test modules do not import each other."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.named import PACKAGES, told_of

ROOT = Path(__file__).parents[2]
CODE = tuple(sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")))
NAMED = re.compile(r"(?<![\w./:-])((?:agent|accountant|fairshare|tests|scripts)(?:\.[a-zA-Z]\w*)+)(?![\w/-]|\.\w)")
OTHER = {"agent.privilege"}
"""Words of that shape that are no module: a value of the chart."""


def _texts(path: Path) -> Iterator[str]:
    """Docstrings and comments."""
    source = path.read_text("utf-8")
    if path.suffix == ".sql":
        yield from (line for line in source.splitlines() if line.lstrip().startswith("--"))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_what_a_docstring_or_a_comment_names_is_there() -> None:
    there = functools.cache(lambda name: name in OTHER or told_of(ROOT, name))
    gone = []
    for path in (*CODE, *sorted((ROOT / "accountant").rglob("*.sql"))):
        # An attribute of a variable looks the same: which of them a text names is asked only where it matters.
        strange = {name for name in NAMED.findall(path.read_text("utf-8")) if not there(name)}
        if strange:
            texts = {name for text in _texts(path) for name in NAMED.findall(text)}
            gone += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(strange & texts)]
    assert gone == []


def test_what_tests_share_stands_in_no_test_module() -> None:
    shared = re.compile(r"^(?:from|import) (tests\.(?:\w+\.)*test_\w+)", re.MULTILINE)
    found = {str(path.relative_to(ROOT)): names for path in CODE if (names := shared.findall(path.read_text("utf-8")))}
    assert found == {}
