"""Writes docs/api.md from the OpenAPI document.

The document itself is held against the running service by its own tests; this page only says it for people. Parameters
`where.NAME`, of which a question has one per dimension, become one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "schema" / "openapi.json"
PAGE = ROOT / "docs" / "api.md"
Node = Mapping[str, Any]

TITLES = {
    "figures": "Figures", "statements": "Reports and statements", "jobs": "Jobs", "periods": "Months",
    "prices": "Prices", "policy": "Policy", "decisions": "Decisions", "usage": "What agents and inventories report",
    "operation": "Operation",
}  # fmt: skip
EVERYWHERE = ("unauthenticated", "forbidden", "too-many-requests", "ledger-unavailable", "authority-unavailable")
"""Refusals that any question may meet: named once, at the top."""

INTRO = """\
# HTTP API

Written by `python -m scripts.api_reference` from [openapi.json](schema/openapi.json); edit the code, not this page.
A running accountant serves the document at `/openapi.json`.

- A caller shows a bearer token (`Authorization: Bearer …`); which scopes there are, and who vouches for a caller, is
  said in [security](security.md).
- Times are UTC milliseconds, spans half open, GPU time integers of microseconds, money decimal text.
- Lists come page by page: `next_page` of an answer is `page` of the next question, all but `limit` unchanged. Pages
  that follow from one another are of one answer, of the moment of the first: they add up to it, and to the totals that
  each of them shows, whatever is booked, priced or decided meanwhile. An answer is kept for a quarter of an hour after
  its last page was asked for, as far as `limits.pages_bytes` has room. Of one that is kept no longer the pages go on
  where it is still the same, as that of a month that is over mostly is; else they are refused (410 `page-gone`), and
  the first page is to be asked for again. A page opens answers to its own question alone, for callers with the same
  rights.
- A refusal is `application/problem+json` with a stable `type`. Any question may meet {everywhere}.

```sh
curl -sf -H "Authorization: Bearer $TOKEN" "$GPUTALLY_URL/v1/usage?by=team&start=2026-10-01&end=2026-11-01"
```

In Python: `gputally.connect(url, token)` gives the same as DataFrames ([the books in pandas](books-in-pandas.ipynb)).
"""


def page(document: Node) -> str:
    """The whole page."""
    by_tag: dict[str, list[str]] = {tag: [] for tag in TITLES}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag[operation["tags"][0]].append("\n".join(_operation(method.upper(), path, operation)))
    parts = [INTRO.format(everywhere=", ".join(f"`{name}`" for name in EVERYWHERE))]
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
    """What an alternative says of itself, where the whole says nothing."""
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
    """A type in words; shapes are links."""
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
    """One line that a table can hold."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


def main() -> None:
    PAGE.write_text(page(json.loads(DOCUMENT.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
