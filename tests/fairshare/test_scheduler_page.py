"""The tables of refs and modes on docs/schedulers.md: what each row says that the controller writes, it writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fairshare.targets.installed import adapters
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Kind, Object, value_at
from gputally.testing.fake_scheduler import NAME, PODS
from tests.fairshare.builders import node_object, policy_of
from tests.fairshare.conftest import Accountant, Make
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases

PAGE = (Path(__file__).parents[2] / "docs/schedulers.md").read_text("utf-8")
REFS = re.findall(r"^\| ((?:`[a-z-]+:[A-Z/]+`(?:, )?)+) \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
NAMED = re.findall(r"^\| ((?:`[a-z-]+:[A-Z/]+`(?:, )?)+) \| ([^|]+) \|", PAGE, re.MULTILINE)
MODES = dict(re.findall(r"^\| `(weight|deserved|hierarchy)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", PAGE, re.MULTILINE))


def _written(field: str) -> tuple[str, ...]:
    """Return the path of a field that the page names in code: `spec.a["b"]`, or an annotation."""
    code = field.partition("`")[2].partition("`")[0]
    if "annotation" in field:
        return "metadata", "annotations", code
    name, _, key = code.partition('["')
    return (*name.split("."), *([key.removesuffix('"]')] if key else []))


def test_the_page_has_every_ref_and_no_other() -> None:
    """A row of a scheduler that is not there has a section of the page about it: they go together."""
    titles = {ref.partition(":")[0]: title for refs, title in NAMED for ref in re.findall(r"`([^`]+)`", refs)}
    known = {prefix for adapter in adapters() for prefix in adapter.prefixes} - {NAME, PODS}
    assert known <= titles.keys()
    there = {prefix.partition("-")[0] for prefix in known}
    sections = re.findall(r"^## (\S+)$", PAGE, re.MULTILINE)
    for prefix in titles.keys() - known:
        assert prefix.partition("-")[0] not in there, f"no adapter of the scheduler reads {prefix}:"
        name = titles[prefix].split()[0]
        assert any(name in (each, each.partition("-")[0]) for each in sections), f"no adapter reads {prefix}:"


OBJECTS: Mapping[str, tuple[str, Kind | None, list[Object]]] = {
    **{row: case for cases in plugin_cases("fairshare", "object_cases").values() for row, case in cases.ROWS.items()},
}  # fmt: skip


@pytest.mark.parametrize("row", OBJECTS)
def test_a_ref_is_written_where_the_page_says(row: str, accountant: Accountant, controller_of: Make) -> None:
    rows = dict(REFS)
    field = rows[row] if rows[row] != "the same" and "the same," not in rows[row] else rows["`kueue-cohort:NAME`"]
    ref, kind, objects = OBJECTS[row]
    target = ref.partition(":")[0].removesuffix("-cohort")
    _compare(ref, kind, _written(field), objects, {target: {"apply": "enforce"}}, accountant, controller_of)


@pytest.mark.parametrize(
    ("name", "mode", "kind", "objects"),
    [(name, *case) for name, cases in plugin_cases("fairshare").items() for case in cases.MODES],
)
def test_a_mode_of_a_scheduler_writes_the_field_of_its_row(
    name: str, mode: str, kind: Kind, objects: list[Object], accountant: Accountant, controller_of: Make
) -> None:
    target = {name: {"mode": mode, "apply": "enforce"}}
    _compare(f"{name}:{{}}", kind, _written(MODES[mode]), objects, target, accountant, controller_of)


def _compare(
    ref: str, kind: Kind | None, path: tuple[str, ...], objects: list[Object], targets: dict[str, Any],
    accountant: Accountant, controller_of: Make,
) -> None:  # fmt: skip
    """Assert that a cycle changes the field at this path of both queues' objects."""
    accountant.spend(a=0.75, b=0.25)
    cluster = MemoryCluster(KINDS, [*objects, node_object("n0", 16)])
    kind = kind or next(each for each in KINDS if (each.api_version, each.kind) == (objects[0]["apiVersion"], "Queue"))
    before = [value_at(obj, path) for obj in cluster.list(kind)]
    policy = policy_of([{"name": name, "deserved": 4, "refs": [ref.format(name)]} for name in "ab"], targets=targets)
    controller_of(policy, cluster).cycle()
    after = [value_at(obj, path) for obj in cluster.list(kind)]
    assert all(now is not None and now != was for now, was in zip(after, before, strict=True)), (before, after)
