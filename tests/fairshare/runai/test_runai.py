"""Run:ai as a target, on a fake control plane: weights, base weights, values of other clients, tokens, limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from accountant.wire.policy_models import Policy
from fairshare.cli.command_options import TargetOptions
from fairshare.controller.weight_writer import adopt, release_weights
from fairshare.schedulers.runai import adapter as runai_target
from fairshare.schedulers.runai.adapter import PROJECT, RunaiAdapter, RunaiApi, RunaiCluster, RunaiFault
from fairshare.targets.installed import opened
from fairshare.targets.status_config_map import StatusObject
from gputally.base.clock import VirtualClock
from gputally.base.errors import ClusterError, ClusterRefused, ClusterUnavailable, Conflict, NotFound
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import CONFIG_MAP, NODE, POD
from gputally.kubernetes.scheduler_plugins import own_schedulers
from gputally.testing.http_server import Trickling, listening
from tests.fairshare.conftest import Accountant, Make
from tests.fairshare.failing_writes import FaultAt
from tests.fairshare.observations import condition, reasons_of, results_of
from tests.fakes.runai import CLIENT, SECRET, StandIn

URL = "https://runai.example"
WHERE = StatusObject("gputally", "gputally-fairshare")


def _policy(apply: str = "enforce", queues: list[dict[str, Any]] | None = None, **target: Any) -> Policy:
    default = [
        {"name": "eng", "weight": 2, "refs": ["runai-department:eng"]},
        {"name": "a", "parent": "eng", "refs": ["runai:a"]},
        {"name": "b", "parent": "eng", "refs": ["runai:b"]},
    ]
    targets = {"kai": {"mode": "off"}, "runai": {"url": URL, "apply": apply, **target}}
    return Policy.model_validate({"queues": queues or default, "targets": targets, "bounds": {"interval": 0}})


@pytest.fixture
def there() -> StandIn:
    """A department with two projects of weight 2, of which one has used most recently."""
    found = StandIn()
    found.unit("departments", "eng", 2)
    found.unit("projects", "a", 2, allocated=8, requested=12)
    found.unit("projects", "b", 2, allocated=2, requested=12)
    found.unit("projects", "a", 3, pool="a100", allocated=1, requested=1)
    return found


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    (tmp_path / "client-id").write_text(f"{CLIENT}\n")
    (tmp_path / "client-secret").write_text(SECRET)
    return tmp_path


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster([CONFIG_MAP, NODE, POD])


@pytest.fixture
def api(there: StandIn, credentials: Path, clock: VirtualClock) -> Iterator[RunaiApi]:
    with RunaiApi(URL, credentials, clock, transport=there.transport) as found:
        yield found


@pytest.fixture
def runai(api: RunaiApi, cluster: MemoryCluster) -> RunaiCluster:
    return RunaiCluster(api, cluster, WHERE.namespace, f"{WHERE.name}-runai")


@pytest.fixture
def loop(accountant: Accountant, controller_of: Make, cluster: MemoryCluster, runai: RunaiCluster) -> Make:
    """A controller; the department and a have used most recently."""
    accountant.spend(eng=0.8, a=0.7, b=0.1)
    given = {"clusters": {"runai": runai}, "status_object": WHERE}
    return lambda policy: controller_of(policy, cluster, **given)


def _notes(cluster: MemoryCluster) -> dict[str, Any]:
    data = cluster.get(CONFIG_MAP, f"{WHERE.name}-runai", WHERE.namespace).get("data") or {}
    return {key: json.loads(text) for key, text in data.items()}


def _bases(cluster: MemoryCluster) -> set[str]:
    return {note["annotations"]["gputally.dev/base-over-quota-weight"] for note in _notes(cluster).values()}


def test_weights_go_to_projects_and_departments_alone(loop: Make, there: StandIn, cluster: MemoryCluster) -> None:
    (target,) = loop(_policy()).cycle().targets
    assert {name: (s.requested, s.allocated) for name, s in target.standings.items()} == {
        "eng": (0.0, 0.0), "a": (12.0, 8.0), "b": (12.0, 2.0),
    }  # fmt: skip
    weights = {weight.queue: weight.value for weight in target.weights}
    assert there.weight("projects", "a") == weights["a"] < weights["b"] == there.weight("projects", "b")
    assert there.weight("projects", "a", "a100") == 3  # another node pool
    for _, body in there.patches:
        ((pool, gpu),) = [(each["nodePool"], each["gpu"]) for each in body]
        assert pool == {"id": "pool-default"}
        assert set(gpu) == {"overQuotaWeight"}
    assert _bases(cluster) == {"2"}
    assert reasons_of(target)["Available"] == ("True", "Writable")
    assert reasons_of(target)["Effective"] == ("Unknown", "SettingNotSeen")
    assert target.preemption is None


def test_a_second_cycle_steps_on_from_what_stands(loop: Make, there: StandIn) -> None:
    controller = loop(_policy())
    for _ in range(6):
        controller.cycle()
    before = len(there.patches)
    assert loop(_policy()).cycle().targets[0].outcomes == ()  # after a restart as well
    assert len(there.patches) == before


def test_a_dry_run_writes_nothing(loop: Make, there: StandIn, cluster: MemoryCluster) -> None:
    assert set(results_of(loop(_policy("dry-run")).cycle()).values()) == {"would-apply"}
    assert there.patches == []
    with pytest.raises(NotFound):
        _notes(cluster)


def test_another_clients_value_stays(
    loop: Make, there: StandIn, accountant: Accountant, cluster: MemoryCluster, runai: RunaiCluster
) -> None:
    controller = loop(_policy())
    controller.cycle()
    there.set("projects", "a", 5)
    accountant.spend(eng=0.8, a=0.1, b=0.7)
    report = controller.cycle()
    assert results_of(report)["a"] == "contested"
    assert there.weight("projects", "a") == 5
    (target,) = report.targets
    assert reasons_of(target)["Available"] == ("False", "Contested")
    assert reasons_of(target)["Effective"] == ("False", "FieldNotOurs")
    assert "overQuotaWeight is 5" in condition(target, "Available").message
    (taken,) = adopt(_policy(), cluster, clusters={"runai": runai})
    assert (taken.queue, taken.owners, taken.result) == ("a", ("run.ai",), "applied")
    assert there.weight("projects", "a") == 5
    assert results_of(controller.cycle())["a"] == "applied"
    assert "5" in _bases(cluster)


def test_release_gives_the_base_back(loop: Make, there: StandIn, cluster: MemoryCluster, runai: RunaiCluster) -> None:
    loop(_policy()).cycle()
    outcomes = release_weights(_policy(), cluster, clusters={"runai": runai})
    assert {outcome.result for outcome in outcomes} == {"applied"}
    assert (there.weight("projects", "a"), there.weight("projects", "b")) == (2, 2)
    assert _notes(cluster) == {}
    assert release_weights(_policy(), cluster, clusters={"runai": runai}) == ()


@pytest.mark.parametrize("arrived", [True, False])
def test_a_crash_amid_a_write_leaves_both_ours(
    arrived: bool, loop: Make, there: StandIn, cluster: MemoryCluster
) -> None:
    loop(_policy()).cycle()
    wrote = there.weight("projects", "a")
    if not arrived:
        there.set("projects", "a", 2)  # what stood before: the request was lost
    assert "contested" not in results_of(loop(_policy()).cycle()).values()
    for _ in range(6):
        loop(_policy()).cycle()
    assert _bases(cluster) == {"2"}
    assert (there.weight("projects", "a") or 9) <= (wrote or 0)


def test_the_other_node_pool_by_its_name(loop: Make, there: StandIn, accountant: Accountant) -> None:
    queues = [{"name": "a", "refs": ["runai:a/a100"]}, {"name": "b", "refs": ["runai:b"]}]
    accountant.spend(a=0.7, b=0.1)
    loop(_policy(queues=queues)).cycle()
    assert (there.weight("projects", "a"), there.weight("projects", "a", "a100") != 3) == (2, True)


def test_a_node_pool_that_counts_history_itself_is_said_to(loop: Make, there: StandIn) -> None:
    there.pools["default"]["schedulingConfiguration"] = {"timeBasedFairShare": {"enabled": True}}
    (target,) = loop(_policy()).cycle().targets
    assert "HistoryCountedTwice" in target.degraded


@pytest.mark.parametrize(
    ("queue", "targets", "fault"),
    [
        (["runai:a"], {}, "set the URL of its control plane in targets.runai.url"),
        (["runai:a", "kai:a"], {"runai": {"url": URL}}, "would reach Run:ai's scheduler twice"),
        (
            ["runai-department:a", "kai:a"],
            {"runai": {"url": URL}, "kai": {"mode": "usage"}},
            "would reach Run:ai's scheduler twice",
        ),
    ],
)
def test_history_reaches_runai_in_one_way_only(queue: list[str], targets: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        Policy.model_validate({"queues": [{"name": "a", "refs": queue}], "targets": targets})
    either = [{"kai": {"mode": "off"}, "runai": {"url": URL}}, {"kai": {"mode": "usage"}, "runai": {"mode": "off"}}]
    for given in either:
        Policy.model_validate({"queues": [{"name": "a", "refs": ["runai:a", "kai:a"]}], "targets": given})


def test_a_token_is_renewed_early_and_after_a_401(api: RunaiApi, there: StandIn, clock: VirtualClock) -> None:
    api.node_pools()
    api.node_pools()
    assert there.tokens == 1
    clock.advance(3_600_000 - 59_000)
    api.node_pools()
    assert there.tokens == 2
    there.revoked = True
    api.node_pools()
    assert there.tokens == 3


def test_the_older_token_endpoint_does_too(credentials: Path, clock: VirtualClock) -> None:
    old = StandIn(v2=False)
    with RunaiApi(URL, credentials, clock, transport=old.transport) as api:
        assert api.node_pools() == []
    assert [path for _, path in old.asked][:2] == ["/api/v2/token", "/api/v1/token"]


def test_secrets_are_in_no_message(credentials: Path, clock: VirtualClock, there: StandIn) -> None:
    secret = credentials / "client-secret"
    secret.write_text("wrong-one")
    with RunaiApi(URL, credentials, clock, transport=there.transport) as api:
        with pytest.raises(ClusterRefused, match="unknown client") as refused:
            api.node_pools()
        assert "wrong-one" not in str(refused.value)
        secret.unlink()
        with pytest.raises(ClusterRefused, match="No such"):
            api.node_pools()


def test_only_https(credentials: Path, clock: VirtualClock) -> None:
    with pytest.raises(ClusterRefused, match="use an https address"):
        RunaiApi("http://runai.example", credentials, clock)
    with pytest.raises(ClusterRefused, match="CA file"):
        RunaiApi(URL, credentials, clock, ca_file=credentials / "client-id")


def test_pages_and_the_own_cluster(api: RunaiApi, there: StandIn, credentials: Path, clock: VirtualClock) -> None:
    for number in range(1100):
        there.rows["projects", f"n{number:04}", "p"] = {"orgUnitName": f"n{number}", "clusterId": "c2"}
    assert len(list(api.units(PROJECT))) == 1100 + 3
    with RunaiApi(URL, credentials, clock, cluster="c1", transport=there.transport) as mine:
        assert len(list(mine.units(PROJECT))) == 3


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (httpx2.Response(403, content=b'{"code":403,"message":"no rights to projects"}'), ClusterRefused, "no rights"),
        (httpx2.Response(400, content=b'{"code":400,"message":"bad weight"}'), ClusterRefused, "bad weight"),
        (httpx2.Response(503), ClusterUnavailable, "503"),
        (httpx2.Response(200, content=b"<html>"), ClusterUnavailable, "not JSON"),
        (httpx2.Response(200, content=b"[]"), ClusterUnavailable, "the response is not that of Run:ai's API"),
    ],
)
def test_what_goes_wrong_is_one_line(
    answer: httpx2.Response, kind: type[Exception], words: str, api: RunaiApi, there: StandIn
) -> None:
    api.node_pools()
    there.answers = [answer]
    with pytest.raises(kind, match=words) as raised:
        list(api.units(PROJECT))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "resources",
    [
        '[{"nodePool": {"id": "p"}, "gpu": {"overQuotaWeight": "lots"}}]',
        '[{"nodePool": {"id": "p"}, "gpu": {"overQuotaWeight": -1}}]',
        "[3]",
        "3",
    ],
)
def test_a_weight_that_is_no_number_is_a_fault_of_the_service(resources: str, api: RunaiApi, there: StandIn) -> None:
    api.node_pools()
    there.answers = [httpx2.Response(200, content=f'{{"resources": {resources}}}'.encode())]
    with pytest.raises(ClusterError):
        api.weight(PROJECT, "a", "p")


def test_who_asks_to_be_left_alone_is(api: RunaiApi, there: StandIn, clock: VirtualClock) -> None:
    api.node_pools()
    there.answers = [httpx2.Response(429, headers={"Retry-After": "30"})]
    with pytest.raises(ClusterUnavailable, match="429"):
        api.node_pools()
    asked = len(there.asked)
    with pytest.raises(ClusterUnavailable, match="asked for a pause"):
        api.node_pools()
    assert len(there.asked) == asked
    clock.advance(30_000)
    assert api.node_pools()


def test_writes_of_one_cycle_are_few(loop: Make, there: StandIn, accountant: Accountant) -> None:
    names = [f"p{number:03}" for number in range(80)]
    for name in names:
        there.unit("projects", name, 7, requested=4)
    queues = [{"name": name, "refs": [f"runai:{name}"]} for name in names]
    accountant.spend(**{name: 0.0125 * (i % 3) for i, name in enumerate(names)})
    results = list(results_of(loop(_policy(queues=queues)).cycle()).values())
    assert results.count("applied") == RunaiAdapter.most_writes == len(there.patches)
    assert results.count("deferred") == len(results) - RunaiAdapter.most_writes > 0


def test_it_is_opened_where_the_policy_names_it(cluster: MemoryCluster, credentials: Path, clock: VirtualClock) -> None:
    other = Policy.model_validate({"queues": [{"name": "a", "refs": ["kai:a"]}]})
    for policy in (other, _policy(mode="off")):
        with opened(policy, cluster, lambda _: None, WHERE, clock) as found:
            assert found == {}
    with opened(_policy(), cluster, {"runai_credentials": credentials}.get, WHERE, clock) as found:
        assert set(found) == {"runai"}
    nothing = opened(_policy(), cluster, lambda _: None, WHERE, clock)
    with pytest.raises(RunaiFault, match="client-id and client-secret"), nothing:
        pass


def test_commands_have_an_option_for_each_file_of_a_scheduler() -> None:
    files = {each.name for scheduler in own_schedulers() for each in scheduler.files}
    assert {"runai_credentials"} <= files <= {each.name for each in fields(TargetOptions)}


def test_an_answer_of_runai_is_bounded_in_size_and_time(
    credentials: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a slow proxy would hold a cycle of the controller for as long as it likes."""
    with listening(Trickling) as url, RunaiApi(url, credentials, clock, timeout_s=0.5) as api:
        with pytest.raises(ClusterUnavailable, match="no whole answer within"):
            api.node_pools()
        monkeypatch.setattr(runai_target, "MOST_BYTES", 3)
        with pytest.raises(ClusterUnavailable, match="larger than 3 bytes"):
            api.node_pools()


class AnsweringAt:
    """Run:ai's control plane, with a fault at one write: the first before 0. carried_out: after the write."""

    def __init__(self, there: StandIn) -> None:
        self.there, self.writes, self.at, self.carried_out = there, 0, -1, False
        self.fault = lambda: httpx2.Response(503)
        self.transport = httpx2.MockTransport(self._answer)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.method != "PATCH":
            return self.there._handle(request)
        self.writes += 1
        if self.writes - 1 != self.at:
            return self.there._handle(request)
        if self.carried_out:
            self.there._handle(request)
        return self.fault()


def _no_answer() -> httpx2.Response:
    raise httpx2.ReadTimeout("timeout")


RUNAI_FAULTS = [(_no_answer, True), (_no_answer, False), (lambda: httpx2.Response(503), False),
                (lambda: httpx2.Response(403), False), (lambda: httpx2.Response(409), False)]  # fmt: skip
NOTE_FAULTS = [(ClusterUnavailable("timeout"), True), (ClusterUnavailable("503"), False),
               (ClusterRefused("403"), False), (Conflict("409", (("other", "data"),)), False)]  # fmt: skip
PLACES = [*(("runai", fault, late) for fault, late in RUNAI_FAULTS), *(("notes", f, late) for f, late in NOTE_FAULTS)]


@pytest.mark.parametrize("released", [False, True], ids=["cycles", "release"])
def test_a_fault_at_any_write_to_runai_or_to_the_notes_changes_nothing_in_the_end(
    released: bool, accountant: Accountant, controller_of: Make, credentials: Path, clock: VirtualClock
) -> None:
    """The weights are those of a run without a fault, the bases stay the operator's, and no weight is taken for that of
    another client."""
    accountant.spend(eng=0.8, a=0.7, b=0.1)

    def run(place: str = "", at: int = -1, fault: Any = None, late: bool = False) -> tuple[Any, dict[str, int]]:
        there = StandIn()
        there.unit("departments", "eng", 2)
        there.unit("projects", "a", 2, allocated=8, requested=12)
        there.unit("projects", "b", 2, allocated=2, requested=12)
        server, cluster = AnsweringAt(there), FaultAt([CONFIG_MAP, NODE, POD])
        with RunaiApi(URL, credentials, clock, transport=server.transport) as api:
            runai = RunaiCluster(api, cluster, WHERE.namespace, f"{WHERE.name}-runai")
            controller = controller_of(_policy(), cluster, clusters={"runai": runai}, status_object=WHERE)
            before: dict[str, int] = {"runai": 0, "notes": 0}
            if released:
                for _ in range(3):
                    controller.later()
                before = {"runai": server.writes, "notes": cluster.writes}
            if place == "runai":
                server.at, server.fault, server.carried_out = before["runai"] + at, fault, late
            elif place == "notes":
                cluster.at, cluster.error, cluster.carried_out = before["notes"] + at, fault, late
            outcomes = []
            for _ in range(2 if released else 5):
                if released:
                    outcomes = [
                        outcome.result for outcome in release_weights(_policy(), cluster, clusters={"runai": runai})
                    ]
                else:
                    outcomes = list(results_of(controller.later()).values())
            assert "contested" not in outcomes, (place, at, fault, late)
            weights = {name: there.weight("projects", name) for name in "ab"} | {
                "eng": there.weight("departments", "eng")
            }
            bases = _bases(cluster) if _notes(cluster) else set()
            writes = {"runai": server.writes - before["runai"], "notes": cluster.writes - before["notes"]}
            return (weights, bases), writes

    wanted, writes = run()
    assert wanted[1] == (set() if released else {"2"})
    assert set(wanted[0].values()) == {2} if released else wanted[0]["a"] < wanted[0]["b"]
    assert min(writes.values()) > 0
    for place, fault, late in PLACES:
        for at in range(min(writes[place], 12)):
            assert run(place, at, fault, late)[0] == wanted, (place, at, fault, late)
