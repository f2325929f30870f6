"""No SQL statement is composed from a value: in the whole tree, SQL text is joined from this project's own names
only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("accountant", "agent", "fairshare", "gputally", "scripts")
SQL = re.compile(
    r"\b(SELECT\s|INSERT\s+(OR\s+\w+\s+)?INTO|DELETE\s+FROM|UPDATE\s+\w+\s+SET|COPY\s|ATTACH\s|DETACH\s|CREATE\s+(TEMP|TABLE|VIEW)"
    r"|DESCRIBE\s|PRAGMA\s|WHERE\s|IN\s*\(|read_parquet|read_csv|start_ms >=)"
)
EXECUTING = {"run", "plainly", "columns", "execute", "executemany", "executescript", "sql", "query"}
OWN = {
    "accountant/storage/duckdb_engine.py": {
        "'enable' if wanted else 'disable'",
        "DUPLICATE",
        "sums",
        "literal",
        "name",
        "source",
        "table",
        "values",
    },
    "accountant/storage/invoice_file.py": {
        "_DAY_S",
        "_MONTH_S",
        "end",
        "middle",
        "said['amount']",
        "said['currency']",
        "said['instance']",
        "said['kind']",
        "said['region']",
        "said['tax']",
        "source",
        "start",
    },
    "accountant/storage/record_archive.py": {
        "key",
        "name",
        "named",
        "query",
        "table",
        "values",
    },
    "accountant/storage/query/group_by_dimensions.py": {
        "\"coalesce(u.who, '')\" if by_user else \"''\"",
        "' AND '.join((f'list_contains(${name}s, {_QUOTED[name]})' for name in filters)) or 'true'",
        "', '.join((_QUOTED[name] for name in columns))",
        "joins",
        "'e.history' if exported else 'NULL'",
        "label_values",
        "quoted",
    },
    "accountant/storage/query/startup_and_lent_time.py": {
        "MS_PER_HOUR",
        "statement('borrowed')",
        "statement('payers')",
    },
    "accountant/storage/query/usage_sums.py": {
        "' UNION ALL '.join(ranges)",
        "_listed(gpus)",
        "few",
        "grouping.condition",
        "grouping.device",
        "grouping.figures",
        "grouping.joins",
        "grouping.payer",
        "grouping.set_condition",
        "instant",
        "number",
        "source",
        "statement('sets_of', ids=few)",
        "tag",
    },
    "accountant/storage/retention.py": {
        "_COLUMNS",
        "_archived(cursor, archive, hours)",
        "_inside(hours)",
        "_inside(ordered)",
        "high + MS_PER_HOUR",
        "low",
        "rows_of(cursor, files)",
        "source",
    },
    "accountant/storage/read_snapshot.py": {
        "' UNION ALL '.join(ranges)",
        "number",
        "_BY_UID",
        "_COUNTED",
        "_POD",
        "condition",
        "named",
        "only",
        "parts",
        "statement(rows)",
        "table",
        "tables",
    },
    "accountant/storage/write/interval_writer.py": {"table"},
    "accountant/storage/write/inventory_and_journal_tables.py": {"ended", "kind", "only"},
    "accountant/storage/write/name_ids.py": {"c", "columns", "match", "self._table", "table"},
    "accountant/storage/write/record_columns.py": {"', '.join(['unnest(?)'] * len(lists))", "table"},
    "accountant/storage/write/rollups.py": {"source"},
    "agent/upload/spool_file.py": {
        "'FULL' if fsync else 'OFF'",
        "'TRUNCATE' if fsync else 'MEMORY'",
        "_AT_ONCE",
        "_LAYOUT * _REPEATED",
        "_PAGE",
        "_SCHEMA",
        "condition",
    },
}
"""By module, what may stand in a statement: names of tables and columns that the module itself lists, whole numbers,
statements of sql/, and two literals that no parameter can replace (ATTACH, the columns of an invoice's file)."""


def composed(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and expression of everything that is put into SQL text, or into an executed statement."""
    found: list[tuple[int, str]] = []
    executed = {
        id(call.args[0])
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in EXECUTING
        and call.args
    }
    for node in ast.walk(tree):
        constant = "".join(
            part.value
            for part in ast.walk(node)
            if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Call)
            and isinstance(part, ast.Constant)
            and isinstance(part.value, str)
        )
        asks = id(node) in executed or SQL.search(constant) is not None
        if isinstance(node, ast.JoinedStr) and asks:
            found += [
                (part.lineno, ast.unparse(part.value)) for part in node.values if isinstance(part, ast.FormattedValue)
            ]
        if isinstance(node, ast.BinOp) and asks and id(node) in executed:
            found.append((node.lineno, ast.unparse(node)))
        formats = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format"
        if formats and isinstance(node.func.value, ast.Constant) and asks:
            found.append((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "statement":
            found += [(part.value.lineno, ast.unparse(part.value)) for part in node.keywords if not _is_own(part.value)]
    return found


def _is_own(part: ast.expr) -> bool:
    """Whether a part of a statement is a literal or another statement."""
    calls = isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "statement"
    return calls or isinstance(part, ast.Constant)


def modules() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def test_nothing_but_our_own_names_is_put_into_a_statement() -> None:
    wrong = []
    for path in modules():
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in ("duckdb", "sqlite", "cursor", "Cursor", "S608")):
            continue
        wrong += [
            f"{name}:{line}: {what} stands in a statement: give it as a parameter"
            for line, what in composed(ast.parse(text))
            if what not in OWN.get(name, ())
        ]
    assert wrong == []


def test_only_modules_that_are_listed_silence_the_linter() -> None:
    silent = {str(path.relative_to(ROOT)) for path in modules() if "S608" in path.read_text(encoding="utf-8")}
    assert silent <= OWN.keys()


@pytest.mark.parametrize(
    "source",
    [
        "cursor.run(f\"SELECT 1 FROM t WHERE epoch = '{epoch}'\")",
        'cursor.run("SELECT 1 FROM t WHERE epoch = " + epoch)',
        'cursor.run("SELECT 1 FROM t WHERE epoch = %s" % epoch)',
        'cursor.run("SELECT 1 FROM t WHERE epoch = {}".format(epoch))',
        'asked = f"FROM read_parquet({quoted(file)})"',
        'db.execute(f"FROM {table}")',
        'cursor.run(statement("take_pods", table=table))',
    ],
)
def test_the_check_finds_what_it_looks_for(source: str) -> None:
    assert composed(ast.parse(source)) != []
