"""A type is taken in by msgspec before there are threads.

msgspec learns a Struct at its first use and shows it to other threads half-learnt: two that first decode the
same type at once can end the process. So each is decoded by a `Decoder` that was made with its module (or with
an object that a composition root makes)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for room in ("agent", "accountant", "fairshare", "gputally") for path in (ROOT / room).rglob("*.py")
)


def _late(tree: ast.AST) -> list[int]:
    """Lines that decode by a type, or make a decoder, when a function is called."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name == "__init__":
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            typed = call.func.attr == "decode" and any(keyword.arg == "type" for keyword in call.keywords)
            if typed or call.func.attr == "Decoder":
                found.append(call.lineno)
    return found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f(raw):\n    return msgspec.json.decode(raw, type=T)", [2]),
        ("def f(raw):\n    return msgspec.json.Decoder(T).decode(raw)", [2]),
        ("one = msgspec.json.Decoder(T)\ndef f(raw):\n    return one.decode(raw)", []),
        ("class C:\n    def __init__(self):\n        self.one = msgspec.json.Decoder(T)", []),
    ],
)
def test_what_is_late_is_found(source: str, lines: list[int]) -> None:
    assert _late(ast.parse(source)) == lines


def test_no_type_is_learnt_on_the_way() -> None:
    texts = {path: text for path in FILES if "ecode" in (text := path.read_text())}  # none else can be late
    late = [f"{path.relative_to(ROOT)}:{line}" for path, text in texts.items() for line in _late(ast.parse(text))]
    assert late == []
