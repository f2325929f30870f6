"""Rules for source code: no decoder built at call time, no unwatched thread, no reference to a missing name, no cryptic
name."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.module_names import PACKAGES, name_exists

ROOT = Path(__file__).parents[2]
CODE = tuple(sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")))
PROGRAMS = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in CODE
    if path.relative_to(ROOT).parts[0] in ("agent", "accountant", "fairshare", "gputally")
}
"""The text of every module of the programs, by its path."""


# --- decoders -----------------------------------------------------------------------------------
# msgspec learns a Struct at its first use and shows it to other threads half-learnt: two that first decode the same
# type at once can end the process. So each is decoded by a `Decoder` that was made with its module (or with an object
# that a composition root makes).


def _late(tree: ast.AST) -> list[int]:
    """Return the lines that build a decoder, or decode by a type, within a function."""
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
    texts = {name: text for name, text in PROGRAMS.items() if "ecode" in text}  # none else can be late
    late = [f"{name}:{line}" for name, text in texts.items() for line in _late(ast.parse(text))]
    assert late == []


_TOO_FEW = re.compile(r"except [^:\n]*(msgspec\.(MsgspecError|DecodeError)|RecursionError)")


def test_who_decodes_a_document_expects_every_kind_of_bad_one() -> None:
    """msgspec's errors do not include UnicodeDecodeError and RecursionError."""
    others = ("gputally/base/yaml_file.py", "gputally/server/tokens_and_grants.py")  # decode with other libraries
    found = [path for path, text in PROGRAMS.items() if _TOO_FEW.search(text) and path not in others]
    assert not found, "name gputally.base.untrusted_text.UNDECODABLE"


# --- threads ------------------------------------------------------------------------------------

WITHOUT_A_TASK = {
    "agent/gpu_readers/nvml/nvml_library.py": "a call to the driver; who made it goes on after its time limit",
    "accountant/history_import/import_run.py": "senders of one import, whose command waits for them",
    "accountant/runtime/background_tasks.py": "one routine of upkeep each, which is a watched task itself",
    "fairshare/web/what_if_worker.py": "one preview, whose page shows its progress, its failure and its time limit",
    "gputally/base/http_calls.py": "the time limit of one answer's headers, which ends with them",
    "gputally/kubernetes/api_client.py": "the time limit of one answer's headers, which ends with them",
    "gputally/base/plugins.py": "one call of a plug-in; the caller waits until its time limit",
    "gputally/testing/engines.py": "callers of an engine at one time, which the test waits for",
    "gputally/testing/http_server.py": "the server of a fake, which its test ends",
    "gputally/demo/simulated_machines.py": "the demo's agents, which the demo waits for",
    "gputally/demo/pipeline.py": "the demo's scheduler, which the demo waits for",
    "gputally/demo/worker_processes.py": "the orders of one of the demo's processes",
}


def makes_threads(text: str) -> bool:
    names = [
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    ]
    return any(name in ("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread") for name in names)


def test_every_thread_is_a_watched_task_or_somebody_waits_for_it() -> None:
    starting = {name for name, text in PROGRAMS.items() if makes_threads(text) and ".watch(" not in text}
    assert starting == WITHOUT_A_TASK.keys()


# --- names --------------------------------------------------------------------------------------

NAMED = re.compile(r"(?<![\w./:-])((?:agent|accountant|fairshare|tests|scripts)(?:\.[a-zA-Z]\w*)+)(?![\w/-]|\.\w)")
OTHER = {"agent.privilege"}
"""Texts in the form of a module name that are values of the chart."""


def _texts(path: Path) -> Iterator[str]:
    """Return docstrings and comments."""
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
    there = functools.cache(lambda name: name in OTHER or name_exists(ROOT, name))
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
