"""Counts how the house is built: what an engineer has to walk through, and what has more than one home.

    python -m scripts.house [--against REV] [--list]

`--against` counts a second state of the repository, a revision of git, with the same rules. `--list` names what was
counted. Nothing is asserted.

- code lines: lines that carry code, so no blank lines, comments or docstrings
- modules that name a word: production modules with the word, unless a folder or file on their path has it
- reading a ledger: public methods of the classes in `READERS` that neither write nor keep it, inherited ones included
- places that look a price up: functions outside `accountant/prices` that call a price book's `unit_price`
- type names in several modules: names of public classes at the top level of more than one production module
- from spool to report: modules of agent and accountant of which a function runs while one interval leaves a spool, is
  posted, and is read in the report of its month
- words: of README and the like, docs/ and its tutorials, decisions (docs/adr) apart, without what is generated

The way of an interval is seen by running it, in a process of its own, so it has all that takes part in a request,
access control too. If a revision cannot be run with the installed packages, the cell says so."""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCTION = ("agent", "accountant", "fairshare", "gputally", "dashboards")
WORDS = ("kueue", "volcano", "kai", "hami", "run:ai", "slurm", "dcgm", "slack", "xlsx", "spark")
OWN = {"dcgm": ("accountant/histories/prometheus/",)}
"""Folders that are a word's own although their names are others: this one reads the exporter's series."""
_PATTERNS = {"run:ai": r"run[:_]?ai", "hami": r"(?<![a-z])hami(?!lton)", "spark": r"(?<![a-z])spark(?!line)"}
READERS = (
    "Questions", "Moment", "Status", "Ledger", "Snapshot", "DuckLedger", "CommitStatus", "LakeLedger", "LakeStatus",
    "Fleet",
)  # fmt: skip
READERS_IN = (
    "accountant/ledger/",
    "accountant/storage/",
    "accountant/duckdb/",
    "accountant/lake/",
    "accountant/fleet/",
)
_WRITES = re.compile(
    r"append|observe|record|retire|withdraw|move|put_|report_|take|set_|restore|redate|import|start|stop|warm"
    r"|adopt|remove|save|checkpoint|close|compact|fold|free|archive|backup|copy|maintain|moment|examine|quarantine"
    r"|publish|forget|release"
)
"""Beginnings of the names of methods that write, keep or open a ledger."""

NOT_WRITTEN = ("api.md", "commands.md", "metrics.md", "CHANGELOG.md")

Tree = Mapping[str, ast.Module]


def modules(root: Path, folders: tuple[str, ...]) -> dict[str, str]:
    """Return the source of each Python module below the folders, by its path."""
    return {
        str(file.relative_to(root)): file.read_text(encoding="utf-8")
        for folder in folders
        for file in sorted((root / folder).rglob("*.py"))
    }


def code_lines(source: str) -> int:
    """Return the number of lines that carry code.

    >>> code_lines('"A docstring."\\n\\n# A comment.\\nx = (1,\\n     2)\\n')
    2
    """
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                documented.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    beside = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    carrying: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in beside:
            carrying.update(range(token.start[0], token.end[0] + 1))
    return len(carrying - documented)


def naming(word: str, sources: Mapping[str, str]) -> list[str]:
    """Return the modules that name the word although no folder or file on their path does."""
    pattern = re.compile(_PATTERNS.get(word, rf"(?<![a-z]){word}"), re.IGNORECASE)
    own = OWN.get(word, ())
    return [
        path
        for path, source in sources.items()
        if pattern.search(source) and not pattern.search(path) and not path.startswith(own)
    ]


def reading_methods(trees: Tree) -> list[str]:
    """Return the methods with which a ledger is read, as `Class.method`."""
    classes = {
        (path, node.name): node for path, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)
    }
    by_name: dict[str, list[ast.ClassDef]] = defaultdict(list)
    for (path, name), node in classes.items():
        if path.startswith(READERS_IN):
            by_name[name].append(node)

    def methods(node: ast.ClassDef, seen: set[str]) -> Iterator[str]:
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and not _WRITES.match(one.name):
                yield one.name
        for base in node.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            if name not in seen:
                for inherited in by_name.get(name, ()):
                    yield from methods(inherited, seen | {name})

    return sorted(
        f"{name}.{method}"
        for name in READERS
        for node in by_name.get(name, ())
        for method in set(methods(node, {name}))
    )


def pricing_places(trees: Tree) -> list[str]:
    """Return the functions that look a price up, as `path:function`."""
    return [
        f"{path}:{node.name}"
        for path, tree in trees.items()
        if not path.startswith("accountant/prices/")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "unit_price"
            and len(call.args) > 1
            for call in ast.walk(node)
        )
    ]


def repeated_types(trees: Tree) -> list[str]:
    """Return the names of public classes that several modules define, with the modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(homes.items()) if len(paths) > 1]


_WALK = """
import json, sys, tempfile, threading
from pathlib import Path
ran, on = set(), False
def look(frame, event, _):
    if on and event == "call":
        ran.add(frame.f_globals.get("__name__", ""))
threading.setprofile(look)
sys.setprofile(look)
import msgspec
from starlette.testclient import TestClient
from accountant.composition import Service
from accountant.core.settings import Settings
from agent.metering.meter import ClosedSet
from agent.upload.spool import Outbox
from agent.wire import Batch, Holder, UsageInterval
from gputally.base.clock import VirtualClock
HOUR, begin = 3_600_000, 1_790_812_800_000  # 2026-10-01
row = UsageInterval(seq=0, start_ms=begin, end_ms=begin + HOUR, gpu_uuid="GPU-1", gpu_model="NVIDIA H100 80GB HBM3",
    holder=Holder(kind="pod", uid="u", namespace="vision", name="train", container="main"), method="simulated",
    capacity_us=HOUR * 1000, allocated_us=HOUR * 1000, busy_us=HOUR * 500)
price = "id: h, model: H100, price: 2, per: gpu-hour, source: contract, basis: gpu-only"
dates = "as_of: 2026-01-01, valid_from: 2026-01-01"
clock = VirtualClock(begin + 2 * HOUR)
with tempfile.TemporaryDirectory() as folder:
    data, prices = Path(folder, "data"), Path(folder, "prices.yaml")
    data.mkdir(); prices.write_text(f"schema: 1\\ncurrency: EUR\\nrows:\\n  - {{{price}, {dates}}}\\n")
    outbox = Outbox(Path(folder, "spool.db"), clock)
    outbox.append([ClosedSet((row,))], [], None)
    with Service(Settings(data=data, prices=prices, linger_ms=0, auth="off"), clock) as service:
        with TestClient(service.app, base_url="http://127.0.0.1") as client:
            on = True
            sent = outbox.pending(100, 10**6, None, None)
            batch = Batch(cluster="c", node="n", boot_id="b", epoch=outbox.epoch, first_seq=sent.first_seq,
                oldest_seq=sent.oldest_seq, intervals=sent.intervals, facts=sent.facts)
            answer = client.post("/v1/usage", content=msgspec.json.encode(batch))
            assert answer.status_code == 200, answer.text
            answer = client.get("/v1/report", params={"month": "2026-10", "format": "json"})
            on = False
            assert answer.status_code == 200, answer.text
            assert "vision" in answer.text
    outbox.close()
print(json.dumps(sorted(name for name in ran if name.startswith(("agent.", "accountant.")))))
"""


def walked(root: Path) -> list[str] | str:
    """Return the modules of which a function runs between a spool and a report, or why this cannot be seen."""
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", _WALK], check=False, cwd=root, capture_output=True, text=True
    )
    if done.returncode:
        return "does not run: " + done.stderr.strip().rsplit("\n", 1)[-1]
    return [str(name) for name in ast.literal_eval(done.stdout.splitlines()[-1])]


def words(root: Path, *patterns: str) -> int:
    """Return the words of the pages that people write: without generated ones and the changelog."""
    pages = {page for pattern in patterns for page in root.glob(pattern) if page.name not in NOT_WRITTEN}
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def counts(root: Path) -> dict[str, list[str] | int | str]:
    """Return what is counted in the repository at `root`: a number, a list of what it counts, or why there is none."""
    sources = modules(root, PRODUCTION)
    trees = {path: ast.parse(source) for path, source in sources.items()}
    tests = modules(root, ("tests",))
    found: dict[str, list[str] | int | str] = {
        "code lines, production": sum(map(code_lines, sources.values())),
        "code lines, tests": sum(map(code_lines, tests.values())),
        "modules, production": len(sources),
    }
    found |= {f"modules that name {word}": naming(word, sources) for word in WORDS}
    found |= {
        "methods for reading a ledger": reading_methods(trees),
        "places that look a price up": pricing_places(trees),
        "type names in several modules": repeated_types(trees),
        "modules from spool to report": walked(root),
        "words, written pages": words(root, "*.md", "docs/*.md", "docs/plugins/*.md"),
        "words, decisions": words(root, "docs/adr/*.md"),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.house", description=__doc__.split("\n")[0])
    parser.add_argument("--against", metavar="REV", help="a revision to count too")
    parser.add_argument("--list", action="store_true", help="name what was counted")
    asked = parser.parse_args()
    columns = {}
    if asked.against:
        git = ["git", "archive", asked.against]
        packed = subprocess.run(git, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout  # noqa: S603 - a local tool
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(packed)) as files:
                files.extractall(folder, filter="data")
            columns[asked.against[:12]] = counts(Path(folder))
    columns["now"] = counts(ROOT)
    width = max(map(len, columns["now"]))
    print(" " * width, *(f"{name:>12}" for name in columns))
    for row in columns["now"]:
        cells = [found[row] for found in columns.values()]
        print(f"{row:{width}}", *(f"{len(one) if isinstance(one, list) else one:>12}" for one in cells))
        if asked.list and isinstance(cells[-1], list):
            print(*(f"    {one}" for one in cells[-1]), sep="\n")


if __name__ == "__main__":
    main()
