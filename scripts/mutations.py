"""Puts small errors into the code, one at a time, and names those that tests do not notice.

    python -m scripts.mutations [--seed N] [--count N] [--most-s N] MODULE... -- PYTEST ARGUMENTS

An error is a wrong operator, a negated condition, a flipped truth value, or a number that is one too large, in a line
of the modules that is drawn at random. Tests that take more than `--most-s` seconds of processor time have noticed it:
an error may make a loop endless. Without an error, the tests must pass: the tool runs them first. Rebuilds of tests use
it: what they caught before, they must catch afterwards.
Use a checkout of its own (`git worktree add`): a file is wrong as long as its tests run, and is then written back."""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType

_OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def _wrong(node: ast.AST) -> ast.AST | None:
    """A copy of the node with one error; None: the node has nothing that could be wrong."""
    found = deepcopy(node)
    match found:
        case ast.Compare(ops=[operator, *_]) if type(operator) in _OPERATORS:
            found.ops[0] = _OPERATORS[type(operator)]()
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) | ast.AugAssign(op=operator) if (
            type(operator) in _OPERATORS
        ):
            found.op = _OPERATORS[type(operator)]()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            found.test = ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=bool(value)):
            found.value = not value
        case ast.Constant(value=int(value)):
            found.value = value + 1
        case ast.Name(id=name, ctx=ast.Load()) if name in _NAMES:
            found.id = _NAMES[name]
        case _:
            return None
    return found


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every node below, as its parent, field and index; without annotations, which no program reads."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield node, name, at
                yield from _places(child)


def wrong_by_line(tree: ast.Module) -> dict[int, list[Callable[[], str]]]:
    """By line: functions that put an error there into the tree, and return what was changed, in words."""
    found = defaultdict(list)
    for parent, name, at in _places(tree):
        held = getattr(parent, name)
        right = held if at is None else held[at]
        wrong = _wrong(right)
        if wrong is None:
            continue

        def put(parent=parent, name=name, at=at, held=held, right=right, wrong=wrong) -> str:
            if at is None:
                setattr(parent, name, wrong)
            else:
                held[at] = wrong
            return " -> ".join(ast.unparse(one).partition("\n")[0] for one in (right, ast.fix_missing_locations(wrong)))

        found[right.lineno].append(put)
    return found


def _is_ours(module: ModuleType) -> bool:
    """Whether the module is in this checkout. A folder without `__init__.py` is a module too, which holds those in it:
    if it stayed, their old code would meet the new one."""
    places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", ()))
    return module.__name__ != "__main__" and any(
        Path(place).is_relative_to(Path.cwd()) and ".venv" not in place for place in places
    )


def _run(options: list[str]) -> int:
    import pytest

    return int(pytest.main(options))


def _in_a_process_of_its_own(options: list[str], most_s: int) -> tuple[bool, str]:
    """Whether the tests pass within these seconds of processor time, and what pytest says."""
    with TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
            os._exit(_run(options))
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return status == 0, said.read()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", type=Path, help="files, for example accountant/lake/publisher.py")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--most-s", type=int, default=300)
    own, tests = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    given = parser.parse_args(own)
    drawn = random.Random(given.seed)  # noqa: S311 - draws places, no secrets
    places = [(module, line) for module in given.modules for line in wrong_by_line(ast.parse(module.read_bytes()))]
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    with redirect_stdout(StringIO()):
        _run(["--collect-only", *options])  # what is imported now, no process imports again
    for name in [name for name, one in sys.modules.items() if _is_ours(one)]:
        del sys.modules[name]
    passed, said = _in_a_process_of_its_own(options, given.most_s)
    if not passed:
        print(f"{said}the tests fail without an error in the code: what they catch says nothing", file=sys.stderr)
        return 2
    survived = 0
    for module, line in drawn.sample(places, min(given.count, len(places))):
        source = module.read_text("utf-8")
        tree = ast.parse(source)
        what = drawn.choice(wrong_by_line(tree)[line])()
        module.write_text(ast.unparse(tree), "utf-8")
        try:
            passed, said = _in_a_process_of_its_own(options, given.most_s)
        finally:
            module.write_text(source, "utf-8")
        survived += passed
        by = next((one.split(" - ")[0] for one in said.splitlines() if one.startswith(("FAILED", "ERROR"))), "")
        print(f"{'survived' if passed else 'caught  '} {module}:{line}: {what}   {by}", flush=True)
    print(f"{survived} survived")
    return bool(survived)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
