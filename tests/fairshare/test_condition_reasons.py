"""Every reason of a condition is on docs/conditions.md and in a test with the objects that cause it and those that
clear it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairshare.core import scheduler_queue_objects
from fairshare.core.queues_and_weights import ConditionReason
from fairshare.preemption.unfinished_preemptions import FinishedPreemptions
from fairshare.targets.installed import adapters
from gputally.base.errors import ClusterRefused, ClusterUnavailable, NotFound
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.scheduler_plugins import SchedulerPlugin, schedulers
from gputally.testing.fake_scheduler import QUEUE, queue_object, setup_object
from scripts import condition_tables
from tests.fairshare.builders import Failing, node_object, policy_of
from tests.fairshare.case_types import Case, Reason
from tests.fairshare.conftest import Accountant, Make
from tests.fairshare.observations import conditions_of
from tests.fairshare.scheduler_kinds import KINDS
from tests.plugin_cases import plugin_cases

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/conditions.md").read_text("utf-8")
WITH_OBJECTS = ("Effective", "InSync", "Mapped")
"""Conditions that the objects of a scheduler decide: each of their reasons has a case below."""

FOR_ADAPTERS = ("core/scheduler_queue_objects.py", "targets/weight_plan.py")
"""The modules whose conditions an adapter explains, because they are made in its name: `InSync` and `ByModel`."""


def _rows() -> Iterator[Reason]:
    """Return the rows of the page's tables."""
    kind = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            kind = line[3:].partition(":")[0]
        elif found := re.fullmatch(r"\| ([^|]+) \| (True|False|Unknown) \| `(\w+)` \|.*", line):
            scope, status, reason = found.groups()
            if scope in ("Mapped", "Readable") or kind == "The controller itself":
                yield "", scope, status, reason
            else:
                for target in scope.split(", "):
                    yield target, kind, status, reason


REASONS = tuple(_rows())


def _literals(path: Path) -> Iterator[tuple[str, str]]:
    """Return type and reason of every Condition that a module creates with literals."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Condition":
            words = [each.value if isinstance(each, ast.Constant) else None for each in node.args[:3]]
            if isinstance(words[0], str) and isinstance(words[2], str):
                yield words[0], words[2]


def test_every_reason_of_the_code_is_on_the_page_and_every_one_of_the_page_is_in_the_code() -> None:
    listed = {(kind, reason) for _, kind, _, reason in REASONS}
    modules = sorted((ROOT / "fairshare").rglob("*.py"))
    made = {found for path in modules for found in _literals(path)}
    assert ("InSync", "AsPolicy") in made
    apart = {found for path in FOR_ADAPTERS for found in _literals(ROOT / "fairshare" / path)}
    assert made - listed - apart == set()
    source = "".join(path.read_text("utf-8") for path in [*modules, ROOT / "gputally/base/errors.py"])
    source = re.sub(r"ConditionReason\(.*?\n *\)", "", source, flags=re.DOTALL)
    assert [reason for _, reason in sorted(listed) if f'"{reason}"' not in source] == []


@pytest.mark.parametrize("plugin", list(schedulers().values()), ids=lambda plugin: plugin.name)
def test_a_scheduler_explains_its_reasons_beside_its_adapter(plugin: SchedulerPlugin) -> None:
    (adapter,) = (each for each in adapters() if each.name == plugin.name)
    folder = (ROOT / plugin.adapter.partition(":")[0].replace(".", "/")).parent
    made = {found for path in folder.glob("*.py") for found in _literals(path)}
    told = {(one.type, one.reason) for one in adapter.reasons}
    assert made
    assert made - told == set()
    calls = [
        node
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "in_sync"
    ]
    assert not calls or ("InSync", "AsPolicy") in told
    unknown = any(keyword.arg == "unknown" for call in calls for keyword in call.keywords)
    assert not unknown or ("InSync", "NotComparable") in told
    assert "ByModel" in {kind for kind, _ in told}, "else the core says that its queues have one quantity"
    assert all(one.cause and one.cure for one in adapter.reasons)


def test_a_condition_without_a_table_is_not_left_out_of_the_page() -> None:
    one = ConditionReason("Awake", "False", "Asleep", "it is night", "wait")
    with pytest.raises(ValueError, match="Awake"):
        condition_tables.page(PAGE, {"Lanes": (one,)})
    told = condition_tables.page(
        PAGE, {"Lanes": (replace(one, type="InSync"),), "Rails": (replace(one, type="InSync"),)}
    )
    assert told.count("\n| Lanes, Rails | False | `Asleep` | it is night | wait |\n") == 1
    assert told.count("| False | `Asleep` |") == 1


NOTED = scheduler_queue_objects.WeightAnnotations(1.0, 0.5, None, 0, "f" * 16).annotations()
ONE, WELL = queue_object("a", quota=8), setup_object()
LEFT_BEHIND = queue_object("old", annotations=NOTED)
CASES: list[Case] = [
    *(case for cases in plugin_cases("fairshare", "object_cases").values() for case in cases.CONDITIONS),
    Case(("", "Mapped", "True", "AllFound"), "fake:a", [ONE, WELL], [WELL]),
    Case(("", "Mapped", "False", "QueuesLeftOut"), "fake:a", [WELL], [ONE, WELL]),
    Case(("", "Mapped", "False", "WeightsLeftBehind"), "fake:a", [ONE, LEFT_BEHIND, WELL],
         [ONE, queue_object("old"), WELL]),
]  # fmt: skip


@pytest.mark.parametrize("mended", [False, True], ids=["wrong", "right"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.reason).strip())
def test_the_objects_of_a_scheduler_bring_a_reason_about_and_make_it_go(
    either_of: Make, case: Case, mended: bool, controller_of: Make
) -> None:
    _, kind, status, reason = case.reason
    target = case.ref.partition(":")[0]
    policy = policy_of([{"name": "a", "refs": [case.ref], **case.queue}], targets={target: case.target})
    cluster = either_of(case.right if mended else case.wrong)
    found = conditions_of(controller_of(policy, cluster).cycle())[f"{target}.{kind}"]
    assert (found == (status, reason)) is not mended, found


OBJECTS = [ONE, queue_object("b", quota=8), WELL, node_object("n1", gpus=8)]
AB = policy_of([{"name": name, "refs": [f"fake:{name}"]} for name in "ab"])


@pytest.fixture
def found(accountant: Accountant, controller_of: Make) -> Make:
    """Return a function that returns status and reason of a condition after a cycle."""
    accountant.spend(a=1.0)
    return lambda cluster, policy=AB, kind="Available": conditions_of(controller_of(policy, cluster).cycle())[
        f"fake.{kind}"
    ]


@pytest.mark.parametrize(("what", "error", "reason"), [
    ("list Queue", NotFound("GET: 404: the server could not find the requested resource"), "CRDAbsent"),
    ("list Queue", ClusterRefused("GET: 403: queues.fake.gputally.dev is forbidden"), "Refused"),
    ("list Queue", ClusterUnavailable("GET: 503: the server is currently unable to handle the request"), "Unavailable"),
    ("apply Queue", NotFound("PATCH: 404: queues.fake.gputally.dev a not found"), "NotFound"),
    ("apply Queue", ClusterRefused("PATCH: 403: admission webhook denied the request"), "Refused"),
    ("apply Queue", ClusterUnavailable("PATCH: 504: timeout"), "Unavailable"),
])  # fmt: skip
def test_what_the_api_server_answers_is_the_reason_until_it_answers_well(
    found: Make, what: str, error: Exception, reason: str
) -> None:
    cluster = Failing(KINDS, OBJECTS)
    cluster.failing, cluster.error = frozenset({what}), error
    assert found(cluster) == ("False", reason)
    cluster.failing = frozenset()
    assert found(cluster) == ("True", "Writable")


@pytest.mark.parametrize(
    ("contested", "available", "effective"),
    [
        (True, ("False", "Contested"), ("False", "FieldNotOurs")),
        (False, ("True", "Writable"), ("True", "WeightsOnly")),
    ],
)
def test_a_contested_field_makes_the_weight_not_ours(
    found: Make, contested: bool, available: Any, effective: Any
) -> None:
    cluster = MemoryCluster(KINDS, OBJECTS)
    if contested:
        spec = {"quota": 8, "weight": 3, "limit": -1}
        cluster.put({**cluster.get(QUEUE, "a"), "spec": spec}, field_manager="argocd")
    assert (found(cluster), found(cluster, kind="Effective")) == (available, effective)


def test_a_target_that_is_off_says_so(found: Make) -> None:
    queues = [{"name": "a", "refs": ["fake:a"]}]
    off = policy_of(queues, targets={"fake": {"mode": "off"}})
    assert found(MemoryCluster(KINDS, OBJECTS), off) == ("Unknown", "Off")
    assert found(MemoryCluster(KINDS, OBJECTS), policy_of(queues)) == ("True", "Writable")


def test_every_reason_that_a_schedulers_objects_decide_has_a_case() -> None:
    apart = {("Run:ai", "Effective"), ("kube-scheduler", "Effective"), ("all", "Effective")}
    wanted = {reason for reason in REASONS if reason[1] in WITH_OBJECTS and reason[:2] not in apart}
    assert {case.reason for case in CASES} == wanted


def test_a_preemption_that_cannot_be_finished_is_a_condition_as_long_as_it_is() -> None:
    unfinished = FinishedPreemptions(faults=("ns/x: PATCH: 403: forbidden",)).condition()
    assert unfinished is not None
    assert (unfinished.status, unfinished.reason) == ("False", "NotResumed")
    assert FinishedPreemptions().condition() is None


def test_every_other_reason_is_named_in_a_test() -> None:
    here = Path(__file__)
    tests = "".join(path.read_text("utf-8") for path in sorted(here.parents[1].rglob("*.py")))
    assert sorted({reason for _, _, _, reason in REASONS if not re.search(f'"{reason}[":]', tests)}) == []
