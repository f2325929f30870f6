"""`explain`: why a queue has its share and why a pod waits, on pods and queues whose answer is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from accountant.wire.policy_models import Decision, Policy
from accountant.wire.usage_cost_and_job_models import BudgetState
from fairshare.__main__ import main
from gputally.kubernetes.objects import POD
from gputally.testing.fake_scheduler import pod_group, queue_object, setup_object
from tests.fairshare.builders import budget_state, cluster_of, node_object, object_of
from tests.fairshare.conftest import Accountant, Capsys, Make
from tests.fairshare.fixed_answers_server import serving, window_of

HOUR_US = 3_600_000_000
MADE = {"namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"}
QUEUES: list[dict[str, Any]] = [
    {"name": "dept", "deserved": 8, "weight": 1, "refs": ["fake:dept"]},
    {"name": "vision", "parent": "dept", "deserved": 4, "weight": 1, "limit": 12, "refs": ["fake:vision"]},
    {"name": "ops", "deserved": 4, "weight": 1, "refs": ["fake:ops"]},
]


def _queue(name: str, requested: int, allocated: int, parent: str | None = None) -> dict[str, Any]:
    return queue_object(name, requested=str(requested), allocated=str(allocated), parent=parent)


def _pod(name: str, gpus: int, *, queue: str = "vision", node: str = "", **spec: Any) -> dict[str, Any]:
    containers = [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]
    placed = {"nodeName": node} if node else {}
    wanted = {"schedulerName": "fake-scheduler", "containers": containers, **placed, **spec}
    marks = {"labels": {"fake.gputally.dev/queue": queue}, "annotations": {"fake.gputally.dev/pod-group": f"pg-{name}"}}
    status = {"phase": "Running" if node else "Pending"}
    return object_of(POD, name, wanted, status, **MADE, uid=f"uid-{name}", **marks)


def _group(pod: str, queue: str, requested: int, allocated: int = 0) -> dict[str, Any]:
    return pod_group(f"pg-{pod}", queue, requested=requested, allocated=allocated, **MADE)


class Scene:
    """The files and the accountant for one question."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policy: dict[str, Any] = {
            "k": 1.0, "bounds": {"interval": 0}, "targets": {"fake": {"apply": "enforce"}}, "queues": QUEUES,
        }  # fmt: skip
        self.objects: list[dict[str, Any]] = [setup_object(), node_object("n1"), node_object("n2")]
        self.usage: Mapping[str, float] = {}
        self.decisions: list[dict[str, Any]] = []
        self.versions: list[dict[str, Any]] = []
        self.budgets: list[BudgetState] = []

    def ask(self, *subject: str) -> int:
        policy, cluster = self.folder / "policy.yaml", self.folder / "cluster.yaml"
        policy.write_text(json.dumps(self.policy))
        cluster.write_text(yaml.safe_dump(self.objects))
        routes = {
            "/v1/windows": window_of(self.usage, 16 * HOUR_US),
            "/v1/decisions": lambda _: self.decisions,
            "/v1/policy/versions": lambda _: self.versions,
            "/v1/budgets": lambda _: [each.model_dump(mode="json") for each in self.budgets],
        }
        with serving(routes) as url:
            return main(["explain", *subject, "--policy", str(policy), "--objects", str(cluster), "--url", url])


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture
def explain(scene: Scene, capsys: Capsys) -> Make:
    """Return a function that runs `explain` for a queue or pod and returns its JSON output."""

    def explain(subject: str) -> dict[str, Any]:
        assert scene.ask(subject, "--output", "json") == 0
        return dict(json.loads(capsys.readouterr().out))

    return explain


def _full(scene: Scene, waiting: int, held: int = 8) -> None:
    """Set up usage: ops requests everything and holds what vision does not; vision waits for `waiting` GPUs."""
    scene.objects += [
        _queue("dept", held + waiting, held), _queue("vision", held + waiting, held, "dept"),
        _queue("ops", 16, 16 - held),
        _pod("runs", held, node="n1"), _group("runs", "vision", held, held),
        _pod("other", 16 - held, queue="ops", node="n2"), _group("other", "ops", 16 - held, 16 - held),
        _pod("train", waiting), _group("train", "vision", waiting),
    ]  # fmt: skip


def test_a_pod_beyond_its_share_waits_for_what_its_history_costs(scene: Scene, explain: Make) -> None:
    scene.usage = {"dept": 0.9, "vision": 0.9, "ops": 0.1}
    _full(scene, 4)
    answer = explain("ml/train")
    words = " | ".join(answer["sentences"])
    assert "for 4 GPUs" in words
    assert "and only 0 GPUs are free: no workload is preempted for it" in words
    due = {level["queue"]: level["entitlement"]["gpus"] for level in answer["queue"]["levels"]}
    assert due == {"dept": 8.0, "vision": 8.0}
    assert "'dept' would hold 4 GPUs more than the 8 it is due" in words
    cures = " | ".join(answer["would_change_it"])
    assert "4 GPUs of 'dept' itself end" in cures
    assert "its history costs 'dept' 2 GPUs" in cures
    assert "a gang of 4 GPUs in 'vision', beside the 8 that it holds, " in cures


@pytest.mark.parametrize(("gpus", "limit", "short"), [(6, 12, 2), (12, -1, 4)])
def test_what_has_to_come_free_is_named(scene: Scene, explain: Make, gpus: int, limit: int, short: int) -> None:
    scene.policy["queues"] = [*QUEUES[:1], {**QUEUES[1], "limit": limit}, *QUEUES[2:]]
    _full(scene, gpus)
    answer = explain("train")
    assert answer["would_change_it"] == [f"{short} GPUs of 'vision' have to come free"]
    more = any("12 GPUs more would be 20 for 'vision'; there are 16 in all" in text for text in answer["sentences"])
    assert more == (limit == -1)


def test_the_narrowest_queue_speaks_and_a_spent_budget_before_any_history(scene: Scene, explain: Make) -> None:
    """The department is 2 GPUs short, the queue below it 8: two freed GPUs would not help it."""
    _full(scene, 4)
    scene.policy["budgets"] = [{"name": "b", "queue": "vision", "limit": 10, "exhausted": "no-over-quota"}]
    scene.budgets = [budget_state("b", "vision", limit="10", spent="12", ratio=1.2)]
    answer = explain("train")
    due = {level["queue"]: level["entitlement"]["gpus"] for level in answer["queue"]["levels"]}
    assert due == {"dept": 10.0, "vision": 4.0}
    assert any("'vision' would hold 8 GPUs more than the 4 it is due" in text for text in answer["sentences"])
    assert answer["would_change_it"] == [
        "4 GPUs come free anywhere, or 8 GPUs of 'vision' itself end",
        "the budget of 'vision' is exhausted: nothing over its quota until the month ends",
    ]


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("vision", "due 2 GPUs now, holds 2, asks for 2: it has all that it asks for"),
        ("ops", "due 0 GPUs now, holds 0, asks for 0: it asks for nothing"),
        ("runs", "it has 2 GPUs on n1"),
    ],
)
def test_what_has_no_unmet_demand_is_explained_so(scene: Scene, explain: Make, subject: str, words: str) -> None:
    scene.objects += [_queue("dept", 2, 2), _queue("vision", 2, 2, "dept"), _queue("ops", 0, 0)]
    scene.objects += [_pod("runs", 2, node="n1"), _group("runs", "vision", 2, 2)]
    assert explain(subject)["sentences"] == [words]


def test_what_others_hold_is_not_free_and_who_leaves_does_not_wait(scene: Scene, explain: Make) -> None:
    """A pod outside the policy's queues holds GPUs that do not appear in their usage."""
    scene.objects += [
        _queue("dept", 4, 0), _queue("vision", 4, 0, "dept"), _queue("ops", 0, 0), _pod("train", 4),
        _group("train", "vision", 4), _pod("strange", 8, queue="else", node="n1"),
        _pod("other", 7, queue="else", node="n2"), _pod("leaves", 1, node="n2"),
    ]  # fmt: skip
    scene.objects[-1]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    answer = explain("train")
    assert answer["queue"]["free"] == 1.0
    assert any("the scheduler may take 3 GPUs back from queues that have more" in text for text in answer["sentences"])
    assert explain("leaves")["sentences"] == ["it is being deleted on n2: it waits for nothing"]


def test_fragmented_free_gpus_are_reported(scene: Scene, explain: Make) -> None:
    scene.objects += [
        _queue("dept", 6, 0), _queue("vision", 6, 0, "dept"), _queue("ops", 8, 8),
        _pod("a", 4, queue="ops", node="n1"), _pod("b", 4, queue="ops", node="n2"), _pod("train", 6),
        _group("train", "vision", 6),
    ]  # fmt: skip
    assert "8 GPUs are free, but no more than 4 on one node" in explain("train")["sentences"]


@pytest.mark.parametrize(
    ("gpus", "held", "limit", "words"),
    [
        (4, 8, 12, "and only 0 GPUs are free: no workload is preempted for it"),
        (4, 0, 12, "within its guaranteed quota: the scheduler may take 4 GPUs back"),
        (6, 8, 12, "'vision' may hold 12 GPUs (limit) and holds 8: 6 more are too many"),
        (20, 8, -1, "there are 16 in all: it can never start"),
    ],
)
def test_why_a_pod_waits(scene: Scene, explain: Make, gpus: int, held: int, limit: int, words: str) -> None:
    scene.policy["queues"] = [*QUEUES[:1], {**QUEUES[1], "limit": limit}, *QUEUES[2:]]
    _full(scene, gpus, held)
    assert any(words in text for text in explain("train")["sentences"])


def test_a_pod_of_no_queue(scene: Scene, explain: Make) -> None:
    _full(scene, 4)
    scene.objects.append(_pod("lost", 1, queue="nobody"))
    answer = explain("lost")
    assert "no queue of the policy has that ref" in answer["sentences"][0]
    assert answer["queue"] is None


def test_a_preempted_pod_that_is_gone_is_explained_by_its_decision(scene: Scene, explain: Make) -> None:
    _full(scene, 4)
    scene.decisions = [
        Decision(
            id="v/1/fake/preempt", at_ms=1_790_000_000_000, kind="preemption", target="fake", subject="ml/pg-old",
            mode="enforce", reason="held beyond its share, given back to ops", policy_version="v",
            inputs={"victims": [{"pod": "ml/old-0"}]},
        ).model_dump(mode="json")
    ]  # fmt: skip
    answer = explain("ml/old-0")
    assert answer["exists"] is False
    assert [d["reason"] for d in answer["past"]] == ["held beyond its share, given back to ops"]


def test_a_queue_says_its_arithmetic_what_stands_in_the_way_and_its_budget(scene: Scene, capsys: Capsys) -> None:
    scene.policy["budgets"] = [{"name": "v", "queue": "vision", "limit": "100"}]
    used_up = {"exhausted_ms": 1_795_348_800_000, "exhausted_earliest_ms": 1_794_916_800_000}
    forecast = {"forecast": 120, "forecast_low": 95, "forecast_high": 145, **used_up}
    scene.budgets = [
        budget_state("v", "vision", spent="120", ratio=1.2, threshold=1.0),
        budget_state("w", "vision", month="2026-11", unit="EUR", spent="75", ratio=0.75, threshold=0.5, **forecast),
    ]
    scene.usage = {"dept": 0.9, "vision": 0.9, "ops": 0.1}
    scene.policy["targets"] = {"fake": {"apply": "dry-run"}}
    scene.objects[0]["spec"] |= {"countsUsage": True}
    _full(scene, 4)
    assert scene.ask("vision") == 0
    out = capsys.readouterr().out
    assert "vision at fake, 16 GPUs, 0 free" in out
    assert "due 8 GPUs now, holds 8, asks for 12: its share is used up" in out
    assert "budget 'v' is exhausted: 120.00 of 100.00 GPU-hours" in out
    assert "75.00 of 100.00 EUR in 2026-11, 25.00 left, used up on 2026-11-22 at this rate" in " ".join(out.split())
    assert "(80 %: 2026-11-17 to later, UTC)" in " ".join(out.split())
    assert "Effective=False HistoryCountedTwice: Setup default counts past use too" in out
    assert "dry-run: weights are computed and not written" in out
    assert "Step by step" in out
    assert "share with history" in out.partition("Step by step")[2]
    assert "ml/pg-train" in out


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("nobody", "nobody: no queue of the policy, no pod that requests GPUs and no recent preemption has this name"),
        ("twin", "twin: several pods have this name (ml/twin, other/twin): write NAMESPACE/NAME"),
    ],
)
def test_an_unknown_or_ambiguous_subject_is_one_line(subject: str, fault: str, scene: Scene, capsys: Capsys) -> None:
    _full(scene, 4)
    first, second = _pod("twin", 1), _pod("twin", 1)
    second["metadata"] |= {"namespace": "other", "uid": "uid-2"}
    scene.objects += [first, second]
    assert scene.ask(subject) == 1
    assert capsys.readouterr().err == f"gputally fairshare: {fault}\n"


def test_past_weights_are_told_with_the_causes_of_their_change(
    scene: Scene, explain: Make, accountant: Accountant, controller_of: Make
) -> None:
    objects = [_queue("dept", 16, 8), _queue("vision", 16, 8, "dept"), _queue("ops", 16, 8)]
    controller = controller_of(Policy.model_validate(scene.policy), cluster_of([*objects, *scene.objects]))
    for used in (0.2, 0.7):
        accountant.spend(dept=used, vision=used, ops=0.3)
        controller.later()
    scene.decisions = [each.model_dump(mode="json") for each in reversed(accountant.decisions)]
    scene.versions = [
        {"version": each.version(), "effective_ms": 0, "policy": each.model_dump(mode="json", by_alias=True)}
        for each in accountant.policies
    ]
    scene.objects += objects
    newest, oldest = [each["reason"] for each in explain("ops")["past"]]
    assert "usage and demand of others" in newest
    assert "since" not in oldest
