"""Writes what is generated in the documentation.

`python -m scripts.reference_pages` (`make reference`) writes, from the code:

- docs/contract/: what programs may rely on (scripts.contracts); the tables of docs/sizing.md; those of a scheduler's
  conditions in docs/conditions.md (scripts.condition_tables); the chart's rights (scripts.chart_roles).
  These are committed, and tests check that they are up to date.
- dist/reference/: the whole reference with all explanations, which a release publishes and nobody commits: the HTTP
  API as a page and as openapi.json, metrics, commands, tables of the lake, values of the chart.

Sources:

- The HTTP API comes from the OpenAPI document of an accountant with an empty ledger. Parameters `where.NAME`, of which
  a query has one per dimension, become one line.
- The agent returns its metric families. Those of the accountant and of fairshare need a ledger or a cluster, so they
  are read from the source code of the calls that create them.
- Commands come from the programs' parsers.

The meaning of a chart value is the comment above it that begins with `# --`. A mapping that is empty, or whose keys the
chart does not define (labels, requests and limits), is one value.

Every figure in `MEASURED` is in docs/performance.md or docs/sizing.md with the command that measured it. The rest of
the table of sizes is arithmetic that the page states in words. Sizes and times are rounded up."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from accountant.lake.tables import TABLES, LakeTable
from agent.metrics.dcgm_compat import DcgmOutput
from agent.metrics.exporter import AgentMetrics
from agent.metrics.metric_families import Operations
from gputally.__main__ import COMMANDS
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.kubernetes.scheduler_plugins import own_schedulers
from gputally.shell_completion import all_commands
from scripts import chart_roles, condition_tables, contracts
from scripts.contracts import Family, Node, default_value, value_of

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "dist" / "reference"
SIZING_PAGE = ROOT / "docs" / "sizing.md"
CONDITIONS_PAGE = ROOT / "docs" / "conditions.md"
LAKE_PAGE = ROOT / "docs" / "lake.md"
VALUES = ROOT / "helm" / "gputally" / "values.yaml"
RIGHTS = ROOT / "helm" / "gputally" / "templates" / "_rights.tpl"

# --- HTTP API -----------------------------------------------------------------------------------

TITLES = {
    "figures": "Figures", "statements": "Reports and statements", "jobs": "Jobs", "periods": "Months",
    "prices": "Prices", "policy": "Policy", "decisions": "Decisions", "usage": "What agents and inventories report",
    "operation": "Operation",
}  # fmt: skip
EVERYWHERE = ("unauthenticated", "forbidden", "too-many-requests", "ledger-unavailable", "authority-unavailable")
"""Refusals of all routes, which the page names only once, at its top."""

API_INTRO = """\
# HTTP API

docs/reference.md says how to call it. Every route may answer {everywhere}.
"""


def api_page(document: Node) -> str:
    """Return the reference of the HTTP API."""
    by_tag: dict[str, list[str]] = {tag: [] for tag in TITLES}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag[operation["tags"][0]].append("\n".join(_operation(method.upper(), path, operation)))
    parts = [API_INTRO.format(everywhere=", ".join(f"`{name}`" for name in EVERYWHERE))]
    for tag, operations in by_tag.items():
        parts += [f"## {TITLES[tag]}\n", *operations]
    parts.append("## Shapes\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append("\n".join(_shape(name, schema)))
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Node) -> Iterator[str]:
    yield f"### {method} {path}\n"
    yield f"{operation['summary']}. {_plain(operation.get('description', ''))}".rstrip() + "\n"
    rows = list(_parameters(operation.get("parameters", ())))
    if rows:
        yield from ("| Parameter | Type | Meaning |", "|---|---|---|", *rows, "")
    if body := operation.get("requestBody"):
        yield f"Body: {_content(body['content'])}.\n"
    good = next(answer for code, answer in operation["responses"].items() if code.startswith("2"))
    yield f"Answer: {_content(good.get('content', {}))}.\n"
    if refusals := sorted(_refusals(operation["responses"])):
        yield "Refusals: " + "; ".join(refusals) + ".\n"


def _parameters(parameters: Any) -> Iterator[str]:
    dimensions = [p["name"].removeprefix("where.") for p in parameters if p["name"].startswith("where.")]
    for parameter in parameters:
        if parameter["name"].startswith("where."):
            continue
        schema, name = parameter["schema"], parameter["name"]
        needed = " (needed)" if parameter.get("required") and parameter["in"] != "path" else ""
        yield f"| `{name}`{needed} | {_type(schema).removesuffix(' or null')} | {_meaning(parameter)} |"
    if dimensions:
        names = ", ".join(f"`{name}`" for name in sorted(dimensions))
        yield f"| `where.NAME` | text | Only groups with this value; NAME is one of {names} |"


def _meaning(field: Node) -> str:
    schema = field.get("schema", field)
    said = _plain(field.get("description") or said_inside(schema))
    default = schema.get("default")
    if default in (None, "", [], {}) or isinstance(default, dict):
        return said
    shown = ", ".join(map(str, default)) if isinstance(default, list) else json.dumps(default).strip('"')
    return f"{said} Default: `{shown}`.".strip()


def said_inside(schema: Node) -> str:
    """Return the description of the first alternative of a schema that has one; "" if none has."""
    return next((str(one["description"]) for one in schema.get("anyOf", ()) if "description" in one), "")


def _refusals(responses: Node) -> Iterator[str]:
    for code, answer in responses.items():
        for each in answer.get("description", "").split("; "):
            match = re.match(r"`([\w-]+)`: (.*)", each)
            if match and match[1] not in EVERYWHERE:
                yield f"{code} `{match[1]}` ({match[2][0].lower()}{match[2][1:]})"


def _content(content: Node) -> str:
    found = []
    for media, one in content.items():
        shape = _type(one.get("schema", {}))
        found.append(shape if media == "application/json" and shape != "anything" else f"`{media}`")
    return ", ".join(found) or "none"


def _type(schema: Node) -> str:
    """Return a type in words. A named schema becomes a link to its section."""
    if ref := schema.get("$ref"):
        name = ref.rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[key]))
    if "allOf" in schema:
        return _type(schema["allOf"][0])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(schema.get('items', schema.get('prefixItems', [{}])[0]))}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"map of {_type(inner)}" if isinstance(inner, dict) and inner else "object"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
    return words.get(kind, "anything") if isinstance(kind, str) else "anything"


def _shape(name: str, schema: Node) -> Iterator[str]:
    yield f"### {name}\n"
    if said := _plain(schema.get("description", "")):
        yield said + "\n"
    properties = schema.get("properties")
    if not properties:
        yield f"{_type({k: v for k, v in schema.items() if k != '$ref'})}\n"
        return
    needed = set(schema.get("required", ()))
    yield from ("| Field | Type | Meaning |", "|---|---|---|")
    for field, inner in properties.items():
        mark = " (needed)" if field in needed else ""
        yield f"| `{field}`{mark} | {_type(inner)} | {_meaning(inner)} |"
    yield ""


def _plain(text: str) -> str:
    """Return the text as one line that can be a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


# --- metrics ------------------------------------------------------------------------------------

MODULES = {
    "Accountant": (
        "accountant.runtime.job_and_task_metrics",
        "accountant.api.ledger_metrics",
        "accountant.compat.kai_usage_api",
        "gputally.server.logs_and_metrics",
    ),
    "Fleet": ("accountant.fleet.fleet_server",),
    "Fairshare": (
        "fairshare.controller.controller_metrics",
        "gputally.server.logs_and_metrics",
    ),
}
_MAKERS = {
    "GaugeMetricFamily": "gauge", "Gauge": "gauge", "gauge": "gauge", "_figure": "gauge",
    "CounterMetricFamily": "counter", "Counter": "counter", "Histogram": "histogram", "InfoMetricFamily": "info",
}  # fmt: skip


def agent_families() -> Iterator[Family]:
    metrics = AgentMetrics("node", "0", tasks=BackgroundTasks(VirtualClock(0)))
    metrics.operate(Operations(nvml_up=True, privilege="allocation"))
    for metric in metrics.collect():
        yield Family(metric.name, metric.kind, metric.labels, metric.text)


def families_in(module: str) -> Iterator[Family]:
    """Yield the families that a module creates, from the calls in its source code. Arguments that are expressions are
    evaluated in the module."""
    loaded = importlib.import_module(module)
    tree = ast.parse(Path(str(loaded.__file__)).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _MAKERS:
            continue
        kind, arguments = _MAKERS[node.func.id], node.args
        if (
            len(arguments) < 2
            or not isinstance(arguments[0], ast.Constant)
            or not str(arguments[0].value).startswith(("gputally_", "training_"))
        ):
            continue
        given = [k.value for k in node.keywords if k.arg == "labels"] or [
            a
            for a in arguments[2:]
            if isinstance(a, ast.List) and node.func.id != "gauge"  # a gauge's are its samples
        ]
        named = _evaluated(given[0], module, vars(loaded)) if given else ("version",) if kind == "info" else ()
        labels = tuple(str(label) for label in named)
        text = _evaluated(arguments[1], module, vars(loaded))
        yield Family(str(arguments[0].value), kind, labels, str(text))


def _evaluated(expression: ast.expr, module: str, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(expression), module, "eval"), names)  # noqa: S307 - our own source


def families_by_program() -> dict[str, list[Family]]:
    """Return the families of each program, sorted, by the program's name."""
    return {
        title: sorted(family for module in modules for family in families_in(module))
        for title, modules in MODULES.items()
    }


def published() -> dict[str, frozenset[str]]:
    """Return the labels that the programs set, for every name of a series that they export. A histogram has three
    names."""
    found: dict[str, frozenset[str]] = {}
    for family in [*agent_families(), *(each for several in families_by_program().values() for each in several)]:
        labels = frozenset(family.labels)
        if family.kind == "histogram":
            found |= {
                f"{family.name}_bucket": labels | {"le"},
                f"{family.name}_sum": labels,
                f"{family.name}_count": labels,
            }
        else:
            found[family.series] = labels
    return found


def _metrics_table(families: Iterable[Family]) -> str:
    lines = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
        lines.append(f"| `{family.series}` | {family.kind} | {labels} | {family.text.rstrip('.')}. |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Return the reference of the metrics."""
    agent = list(agent_families())
    devices = [f for f in agent if f.name.startswith("gputally_gpu_")]
    holders = [f for f in agent if f.name.startswith("gputally_pod_")]
    rest = [f for f in agent if f not in devices and f not in holders]
    parts = [
        "# Metrics\n\ndocs/reference.md explains what they have in common.\n",
        "## Agent: GPUs\n",
        _metrics_table(devices),
        "## Agent: holders\n",
        _metrics_table(holders),
        "## Agent: itself\n",
        _metrics_table(rest),
    ]
    for title, found in families_by_program().items():
        parts += [f"## {title}\n", _metrics_table(found)]
    parts.append(
        "## Names of dcgm-exporter\n\n"
        "With `--dcgm-names` the agent shows these too, for dashboards that were made for dcgm-exporter, with its\n"
        "labels and units. Each pod that shares a GPU has its own share; do not scrape both exporters into one\n"
        "dashboard.\n\n" + "\n".join(f"- `{name}`" for name in dcgm_names()) + "\n"
    )
    return "\n".join(parts)


def dcgm_names() -> list[str]:
    """Return the names of dcgm-exporter that the agent can show."""
    return sorted(metric.name for metric in DcgmOutput("node").collect())


# --- commands -----------------------------------------------------------------------------------


def commands_page() -> str:
    """Return the reference of the commands."""
    found = list(all_commands())
    rows = [f"| [`gputally {name}`](#gputally-{name}) | {command.help} |" for name, command in COMMANDS.items()]
    index = "\n".join(["| command | what it does |", "|---|---|", *rows]) + "\n"
    return "# Commands\n\n" + index + "".join(_section(path, command) for path, command in found)


def _section(path: str, command: Any) -> str:
    depth = "##" if path.count(" ") == 1 else "###"
    inner = list(getattr(command, "commands", {}))
    parameters = [each for each in command.params if each.name != "help"]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    text = _paragraphs(COMMANDS[path.split()[1]].help if inner and not command.help else command.help or "")
    parts = [f"\n{depth} {path}\n\n{text}\n"]
    if inner:
        below = ", ".join(f"[{name}](#{path.replace(' ', '-')}-{name})" for name in inner)
        parts.append(f"\nCommands: {below}.\n")
    if arguments or options:
        rows = [*map(_argument, arguments), *sorted(map(_option, options))]
        parts.append("\n" + "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *rows]) + "\n")
    return "".join(parts)


def _paragraphs(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _argument(argument: Any) -> str:
    name = (argument.name or "").upper().replace("_", "-")
    return _command_row(f"`{name}`" + ("" if argument.required else " (optional)"), argument)


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len, reverse=True))
    names += " (required)" if option.required else ""
    return _command_row(names + (", repeatable" if option.multiple else ""), option)


def _command_row(names: str, parameter: Any) -> str:
    variable = parameter.envvar
    meaning = " ".join((getattr(parameter, "help", None) or "").split())
    if variable and variable not in meaning:
        meaning += f" Environment: `{variable}`."
    cells = [names, value_of(parameter), default_value(parameter), meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# --- values of the chart --------------------------------------------------------------------------

_LONGEST_DEFAULT = 60


class Value(NamedTuple):
    """A value of the chart. default: the default as it is shown, one line of JSON or `see values.yaml`."""

    path: str
    default: str
    meaning: str


def chart_values(text: str) -> Iterator[Value]:
    """Yield every value in the text of a values.yaml, in its order. Raises ValueError for a value without a comment."""
    lines = text.splitlines()

    def leaves(node: yaml.MappingNode, data: dict[str, Any], path: str) -> Iterator[Value]:
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            meaning = _comment_above(lines, key.start_mark.line)
            if meaning is not None:
                yield Value(inner, _shown_default(data[key.value]), meaning)
            elif isinstance(value, yaml.MappingNode):
                yield from leaves(value, data[key.value], inner)
            else:
                raise ValueError(
                    f"values.yaml:{key.start_mark.line + 1}: {inner} has no comment that explains it (`# -- …`)"
                )

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from leaves(root, yaml.safe_load(text), "")


def _comment_above(lines: list[str], at: int) -> str | None:
    comment: list[str] = []
    while at and lines[at - 1].strip().startswith("#"):
        at -= 1
        comment.insert(0, lines[at].strip().removeprefix("#").strip())
    if not comment or not comment[0].startswith("-- "):
        return None
    return " ".join(comment).removeprefix("-- ")


def _shown_default(data: Any) -> str:
    if isinstance(data, str) and ("\n" in data or len(data) > _LONGEST_DEFAULT):
        return "see values.yaml"
    shown = json.dumps(data, ensure_ascii=False)
    return f"`{shown}`" if len(shown) <= _LONGEST_DEFAULT else "see values.yaml"


def _cell(text: str) -> str:
    """Escape a text for a cell of a table. In code between backquotes, only the bar needs an escape."""
    words = text.split("`")
    return "`".join(re.sub(r"[|]" if at % 2 else r"[|<>]", r"\\\g<0>", part) for at, part in enumerate(words))


def values_tables(text: str) -> str:
    """Return a table for each group of the values in the text of a values.yaml."""
    groups: dict[str, list[Value]] = {}
    for value in chart_values(text):
        head, dot, _ = value.path.partition(".")
        groups.setdefault(head if dot else "", []).append(value)
    parts = []
    for group, members in groups.items():
        rows = [f"| `{value.path}` | {value.default} | {_cell(value.meaning)} |" for value in members]
        title = f"### {group}\n\n" if group else "### Everything\n\n"
        parts.append(title + "\n".join(["| Value | Default | Meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


# --- sizing ---------------------------------------------------------------------------------------

SIZING_BEGIN, SIZING_END = "<!-- computed by scripts/reference_pages.py -->", "<!-- end of what is computed -->"
FLEETS = (100, 1_000, 10_000, 100_000)
ROWS_PER_GPU_DAY = 24 * 60
GPUS_PER_NODE = 8
MINUTES_OF_OUTAGE = 60


@dataclass(frozen=True)
class Measured:
    """Measured figures of one accountant.

    bytes_per_row: size of the ledger file, rollups included, per row.
    ingest_us: processor time per row in microseconds.
    rows_per_s: rows that a machine with two cores acknowledges, with the senders on the same machine.
    wire_bytes: size of a compressed batch of eight rows."""

    bytes_per_row: float = 27
    ingest_us: float = 27.5
    rows_per_s: float = 35_736
    wire_bytes: float = 549


MEASURED = Measured()


@dataclass(frozen=True)
class Load:
    """What the accountant needs for `gpus` whole GPUs with intervals of a minute."""

    gpus: int
    rows_per_day: int
    file_per_day_mb: float
    file_per_year_gb: float
    ingest_s_per_day: float
    arriving_kib_per_s: float
    catch_up_s: float


def load(gpus: int, of: Measured = MEASURED) -> Load:
    rows = gpus * ROWS_PER_GPU_DAY
    return Load(
        gpus=gpus,
        rows_per_day=rows,
        file_per_day_mb=rows * of.bytes_per_row / 1e6,
        file_per_year_gb=rows * 365 * of.bytes_per_row / 1e9,
        ingest_s_per_day=rows * of.ingest_us / 1e6,
        arriving_kib_per_s=gpus / GPUS_PER_NODE * of.wire_bytes / 60 / 1024,
        catch_up_s=gpus * MINUTES_OF_OUTAGE / of.rows_per_s,
    )


def sizing_table(fleets: tuple[int, ...] = FLEETS) -> str:
    """Return the table of sizes, with one line per number of GPUs."""
    heads = ("GPUs", "Rows a day", "Ledger file a day", "in a year", "Processor for ingest", "Arrives")
    heads += ("After an hour's outage",)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for gpus in fleets:
        one = load(gpus)
        cells = (
            f"{gpus:,}", f"{one.rows_per_day / 1e6:,.2f} M", f"{_rounded_up(one.file_per_day_mb)} MB",
            f"{_rounded_up(one.file_per_year_gb)} GB", _duration(one.ingest_s_per_day) + " a day",
            f"{_rounded_up(one.arriving_kib_per_s)} KiB/s", _duration(one.catch_up_s),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rounded_up(value: float) -> str:
    return f"{math.ceil(value):,}" if value >= 1 else "< 1"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "< 1 s"
    return f"{math.ceil(seconds)} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"


LAKE_FLEETS = (10_000, 100_000, 300_000, 1_000_000)
GPUS_PER_CLUSTER = 5_000
HOURS_PER_YEAR = 365 * 24


@dataclass(frozen=True)
class MeasuredLake:
    """Measured figures of the lake, in seconds of a machine with two cores.

    bytes_per_gpu_hour: size of the table usage_hourly.
    gpus: number of GPUs of the measured fleet, in clusters of `GPUS_PER_CLUSTER`.
    stated_s, rows_s: time to query the cost of a month from statements, and from rows.
    window_s: time to query the usage of 30 days by queue.
    publish_s: time to publish a day of 10,000 GPUs."""

    bytes_per_gpu_hour: float = 25.8
    gpus: int = 100_000
    stated_s: float = 0.21
    rows_s: float = 4.8
    window_s: float = 7.7
    publish_s: float = 7.0


MEASURED_LAKE = MeasuredLake()


def lake_sizing_table(fleets: tuple[int, ...] = LAKE_FLEETS, of: MeasuredLake = MEASURED_LAKE) -> str:
    """Return the table of sizes of a lake in which all clusters of a fleet publish, with one line per number of
    GPUs."""
    heads = ("GPUs", "Clusters", "Lake a year", "Month, as stated", "Month, from its rows", "30 days by queue")
    heads += ("Publishing a day, each cluster",)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for gpus in fleets:
        times = gpus / of.gpus
        cells = (
            f"{gpus:,}", f"{gpus // GPUS_PER_CLUSTER:,}",
            f"{_rounded_up(gpus * HOURS_PER_YEAR * of.bytes_per_gpu_hour / 1e9)} GB",
            *(_duration(seconds * times) for seconds in (of.stated_s, of.rows_s, of.window_s)),
            _duration(of.publish_s * GPUS_PER_CLUSTER / 10_000),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sizing_page(text: str) -> str:
    """Return the page docs/sizing.md with new tables. text: the present page."""
    parts = text.split(SIZING_BEGIN)
    for at, table in enumerate((sizing_table(), lake_sizing_table()), 1):
        parts[at] = f"\n\n{table}\n\n{SIZING_END}{parts[at].partition(SIZING_END)[2]}"
    return SIZING_BEGIN.join(parts)


# --- lake -----------------------------------------------------------------------------------------


def lake_tables() -> str:
    """Return a section for each table of the lake, with its columns."""
    return "\n\n".join(map(_lake_table, TABLES))


def _lake_table(table: LakeTable) -> str:
    rows = "\n".join(f"| `{column.name}` | {column.type} | {column.text} |" for column in table.columns)
    names = {"Partitioned by": table.partition, "One row for each": table.key, "Sorted by": table.order}
    said = ". ".join(f"{what} {', '.join(f'`{name}`' for name in columns)}" for what, columns in names.items())
    return f"### {table.name}\n\n{table.text} {said}.\n\n| column | type | what it holds |\n|---|---|---|\n{rows}"


def committed() -> dict[Path, str]:
    """Return the generated files that are committed, by path."""
    return {
        contracts.FOLDER / "api.txt": contracts.api(contracts.api_document()),
        contracts.FOLDER / "commands.txt": contracts.commands(),
        contracts.FOLDER / "metrics.txt": contracts.metrics(
            {"Agent": list(agent_families())} | families_by_program(), dcgm_names()
        ),
        contracts.FOLDER / "lake.txt": contracts.lake(TABLES),
        SIZING_PAGE: sizing_page(SIZING_PAGE.read_text(encoding="utf-8")),
        CONDITIONS_PAGE: condition_tables.page(CONDITIONS_PAGE.read_text("utf-8"), condition_tables.reasons()),
        RIGHTS: chart_roles.template(own_schedulers()),
        VALUES: chart_roles.values(VALUES.read_text(encoding="utf-8"), own_schedulers()),
    }


def published_reference() -> dict[str, str]:
    """Return the files of the reference with all explanations, by name."""
    document = contracts.api_document()
    return {
        "api.md": api_page(document),
        "openapi.json": json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
        "metrics.md": metrics_page(),
        "commands.md": commands_page(),
        "lake-tables.md": "# Tables of the lake\n\n" + lake_tables() + "\n",
        "chart-values.md": "# Values of the chart\n\n" + values_tables(VALUES.read_text(encoding="utf-8")),
    }


def write_reference() -> None:
    """Write dist/reference."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, text in published_reference().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")


def main() -> None:
    contracts.FOLDER.mkdir(exist_ok=True)
    for file, text in committed().items():
        file.write_text(text, encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: written")
    write_reference()
    print(f"{REFERENCE.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
