"""Usage of several clusters: in one accountant, and the sum of the windows of several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.wire.policy_models import Measure, Policy, UsageWindow, WindowSpec
from fairshare.__main__ import main
from fairshare.controller.control_loop import Controller, by_hand
from fairshare.controller.cycle_report import CycleReport, replay_weights
from fairshare.controller.policy_file import reloaded
from fairshare.core.queues_and_weights import FleetWindow
from fairshare.explain.what_if_simulation import history_from_ledger
from fairshare.preemption.preemption_controller import NotPossible
from fairshare.preemption.preemption_types import PreemptionCall
from fairshare.usage.accountant_client import AccountantApi, other_clusters
from fairshare.usage.multi_cluster_windows import OtherClusters
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import Object
from gputally.server.https_server import serve
from gputally.testing.fake_scheduler import queue_object, setup_object
from tests import empty_ledger
from tests.fairshare.builders import cluster_of, node_object, policy_of
from tests.fairshare.conftest import Accountant, Capsys, Make
from tests.fairshare.observations import conditions_of, hold_of, weights_in
from tests.usage_records import batch, interval, pod_facts, pod_holder

MINUTE_MS, MINUTES, GPUS = 60_000, 70, 4
WINDOW = {"size": "1h", "half_life": None}


def report(service: Service, clock: VirtualClock, cluster: str, held: dict[str, int], node: str = "n1") -> None:
    """Report, as a node's agent, the last minutes: this number of GPUs held by each queue."""
    queues = [queue for queue, count in held.items() for _ in range(count)]
    now_ms = clock.wall_ms()
    facts = [pod_facts(f"pod-{queue}", now_ms, node=node, queue_ref=f"fake:{queue}") for queue in held]
    holders = [*(pod_holder(f"pod-{queue}") for queue in queues[:GPUS]), *[None] * (GPUS - len(queues))]
    rows = [
        interval(at, f"GPU-{gpu}", holder, span_ms=MINUTE_MS, gpu_model="H100", busy_us=None, method="device")
        for at in range(now_ms - MINUTES * MINUTE_MS, now_ms, MINUTE_MS)
        for gpu, holder in enumerate(holders)
    ]
    one = batch(rows, facts, cluster=cluster, node=node, epoch=f"0192-{cluster}")
    service.ingest.submit(msgspec.json.encode(one)).result(timeout=20)


BOTH = {"clusters": ["prod", "west"]}


class Elsewhere(Accountant):
    """The accountant of cluster `west`, with the same policy. changed: fields of its windows."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.spend(a=0.5)
        self.changed: dict[str, object] = {"cluster": "west", "policy_counting": policy.counting()}

    def window(self, spec: WindowSpec, measure: Measure, at_ms: int, min_coverage: float) -> UsageWindow:
        return super().window(spec, measure, at_ms, min_coverage).model_copy(update=self.changed)


def fake_cluster(*more: Object) -> MemoryCluster:
    return cluster_of([*map(queue_object, "abc"), setup_object(), *more])


@pytest.fixture
def fleet(accountant: Accountant, controller_of: Make) -> Make:
    """The policy, the accountant of `west`, the cluster `prod` and its controller; a used GPUs there, b here."""

    def make(**options: Any) -> tuple[Policy, Elsewhere, MemoryCluster, Controller]:
        policy, cluster = policy_of(usage=BOTH, **options), fake_cluster()
        west = Elsewhere(policy)
        accountant.spend(b=0.5)
        others = OtherClusters("prod", {"west": west})
        return policy, west, cluster, controller_of(policy, cluster, others=others)

    return make


@pytest.mark.parametrize(("fault", "reason", "words"), [
    ({"down": True}, "AccountantUnavailable", "connection refused"),
    ({"coverage": 0.9}, "LowCoverage", "90.00% of the window is metered"),
    ({"age_ms": 3_600_000}, "StaleUsage", "usage is 3600 s old"),
    ({"age_ms": None}, "NoUsage", "knows of no GPU"),
    ({"capacity": 0}, "NoCapacity", "has no capacity of cluster 'west': do its agents report this name?"),
    ({"half_life_s": 60}, "WindowsDiffer", "the half_life_s of its window is 60, and None here"),
    ({"start_ms": 5}, "WindowsDiffer", "the start_ms of its window is 5"),
    ({"unit": "1e-9 EUR"}, "WindowsDiffer", "the unit of its window is 1e-9 EUR, and gpu_us here"),
    ({"measure": "busy"}, "WindowsDiffer", "the measure of its window is busy"),
    ({"cluster": None}, "WindowsDiffer", "its accountant answered for every cluster in its ledger"),
    ({"cluster": "prod"}, "WindowsDiffer", "its accountant answered for cluster 'prod'"),
    ({"policy_counting": "f" * 16}, "PolicyNotInForce", "give both the same queues"),
])  # fmt: skip
def test_one_cluster_that_cannot_be_added_holds_the_weights_until_it_can(
    fleet: Make, accountant: Accountant, clock: VirtualClock, fault: dict[str, Any], reason: str, words: str
) -> None:
    _, west, cluster, controller = fleet()
    assert controller.cycle().hold is None
    before = weights_in(cluster)
    assert before["c"] > before["a"] == before["b"], "a was used there, b here"

    west.spend(c=0.9)
    good = dict(west.changed)
    for what, value in fault.items():
        if hasattr(west, what):
            setattr(west, what, value)
        else:
            west.changed[what] = value
    clock.advance(MINUTE_MS)
    held = controller.cycle()
    assert hold_of(held)[0] == reason
    assert hold_of(held)[1].startswith("cluster west: ")
    assert words in hold_of(held)[1]
    assert conditions_of(held)["UsageFresh"] == ("False", reason)
    assert weights_in(cluster) == before, "the last good weights stay"
    assert accountant.decisions[-1].kind == "hold"

    west.changed, west.down, west.coverage, west.age_ms, west.capacity = good, False, 1.0, 0, accountant.capacity
    clock.advance(MINUTE_MS)
    assert controller.cycle().hold is None
    assert weights_in(cluster)["c"] < before["c"]


def test_a_cluster_without_accountant_holds_after_its_own_faults(accountant: Accountant, controller_of: Make) -> None:
    policy = policy_of(usage=BOTH)
    reason, message = hold_of(controller_of(policy, fake_cluster()).cycle())
    assert (reason, "'prod'" in message) == ("ClusterUnknown", True)
    accountant.coverage = 0.5
    reason, message = hold_of(controller_of(policy, fake_cluster()).cycle())
    assert (reason, message[:6]) == ("LowCoverage", "50.00%")


def test_the_policy_is_announced_to_the_own_accountant_alone(fleet: Make, accountant: Accountant) -> None:
    policy, west, _, controller = fleet()
    controller.cycle()
    assert (accountant.policies, west.policies) == ([policy], [])
    assert (len(accountant.decisions) > 0, west.decisions) == (True, [])


def test_a_list_with_the_own_cluster_alone_changes_nothing(accountant: Accountant, controller_of: Make) -> None:
    accountant.spend(a=0.5)
    here = OtherClusters("prod", {})
    one, same = fake_cluster(), fake_cluster()
    controller_of(policy_of(), one).cycle()
    found = controller_of(policy_of(usage={"clusters": ["prod"]}), same, others=here).cycle()
    assert not isinstance(found.window, FleetWindow)
    assert weights_in(one) == weights_in(same)


def test_the_own_cluster_alone_says_what_there_is_to_divide(fleet: Make, accountant: Accountant) -> None:
    _, west, _, controller = fleet()
    found = controller.cycle()
    assert isinstance(found.window, FleetWindow)
    assert found.window.capacity == accountant.capacity + west.capacity
    assert found.window.own.usage == accountant.usage
    assert found.targets[0].gpus == 16, "the GPUs of both would be 32"


def test_a_decision_on_several_clusters_replays_bit_for_bit(fleet: Make, accountant: Accountant) -> None:
    policy, _, _, controller = fleet(k=2.0)
    found = controller.cycle()
    (inputs,) = (each for each in accountant.decisions if each.subject == "*")
    assert inputs.inputs["window"]["clusters"] == ["prod", "west"]  # type: ignore[index, call-overload]
    again = replay_weights(policy, inputs.model_validate_json(inputs.model_dump_json()))
    assert again.weights == found.targets[0].weights


def test_room_is_not_made_by_hand_while_a_cluster_is_away(accountant: Accountant, clock: VirtualClock) -> None:
    policy = policy_of(usage=BOTH)
    west = Elsewhere(policy)
    west.down = True
    call = PreemptionCall("", "ns/job", "asked for by hand", 0.0, "by hand")
    given = (policy, accountant, fake_cluster(), clock, (), call, "dry-run")
    with pytest.raises(NotPossible, match="AccountantUnavailable: cluster west: "):
        by_hand(*given, others=OtherClusters("prod", {"west": west}))


POLICY_TEXT = """schema: 1
usage:
  clusters:
    - prod
    - west
queues:
  - {name: a, refs: ["fake:a"]}
"""


def test_a_cluster_that_no_accountant_is_known_for_is_refused_with_its_place(file: Make) -> None:
    path = file(POLICY_TEXT)
    with pytest.raises(FileFault) as refused:
        reloaded(path, OtherClusters("prod", {"east": Elsewhere(policy_of())}))
    (fault,) = refused.value.faults
    assert fault == (
        f"{path}:5: usage.clusters.1: no accountant is known for cluster 'west': add it to the accountants file"
        " (--accountants), which names east"
    )
    with pytest.raises(FileFault, match="this cluster has no name in the ledger: set cluster "):
        reloaded(path, OtherClusters("", {"west": Elsewhere(policy_of())}))
    assert reloaded(path, OtherClusters("prod", {"west": Elsewhere(policy_of())})).current.usage.clusters


@pytest.mark.parametrize(("text", "words"), [
    ("clusters: {west: {url: accountant}}", r":1: clusters.west.url: "),
    ("clusters: {west: {url: 'http://a', token: x}}", r"clusters.west.token: unknown key"),
    ("west: {url: 'http://a'}", r"west: unknown key"),
    ("clusters:\n  '': {url: 'http://a'}", r"input:2: "),
])  # fmt: skip
def test_a_faulty_accountants_file_is_refused_with_its_place(file: Make, text: str, words: str) -> None:
    with pytest.raises(FileFault, match=words):
        other_clusters(file(text), "prod")


def test_lists_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster 'west' is listed twice in usage\.clusters"):
        policy_of(usage={"clusters": ["west", "west"]})


def test_policies_without_clusters_keep_their_version() -> None:
    queues = [{"name": "a", "refs": ["fake:a"]}]
    plain = Policy.model_validate({"queues": queues})
    assert plain.version() == Policy.model_validate({"queues": queues, "usage": {}}).version()
    assert "usage" not in plain.model_dump(mode="json")
    assert Policy.model_validate({"queues": queues, "usage": {"clusters": []}}).version() == plain.version()
    counting = Policy.model_validate({"queues": queues, "usage": BOTH})
    assert counting.version() != plain.version()
    assert counting.counting() == plain.counting(), "the queues are made of the same"
    assert Policy.model_validate_json(counting.model_dump_json(by_alias=True)) == counting


@pytest.fixture
def accountants(tmp_path: Path, clock: VirtualClock) -> Iterator[Make]:
    """Return a function that starts an accountant whose clusters held these GPUs."""
    clock.advance(-clock.wall_ms() % MINUTE_MS)
    with ExitStack() as open_:

        def start(policy: Policy, **held: dict[str, int]) -> tuple[Service, str]:
            data = tmp_path / "-".join(held)
            settings = Settings(data=empty_ledger.data(data), auth="off", linger_ms=0)
            service = open_.enter_context(Service(settings, clock))
            service.ledger.put_policy(policy, clock.wall_ms() - 120 * MINUTE_MS)
            for cluster, queues in held.items():
                report(service, clock, cluster, queues)
            return service, open_.enter_context(serve(service.app, "127.0.0.1", 0))

        yield start


def test_two_accountants_decide_as_one_ledger(
    accountants: Make, clock: VirtualClock, tmp_path: Path, capsys: Capsys
) -> None:
    policy = policy_of(window=WINDOW, k=1.0, usage=BOTH)
    held = {"prod": {"a": 3, "b": 1}, "west": {"c": 4}}
    plain = policy_of(window=WINDOW, k=1.0)
    _, whole = accountants(plain, **held)
    _, here = accountants(policy, prod=held["prod"])
    _, there = accountants(policy, west=held["west"])
    file = tmp_path / "accountants.yaml"
    file.write_text(json.dumps({"clusters": {"prod": {"url": here}, "west": {"url": there}}}))
    one, several = fake_cluster(node_object("n1", gpus=GPUS)), fake_cluster(node_object("n1", gpus=GPUS))
    with AccountantApi(whole) as client:
        mixed = Controller(plain, client, one, clock).cycle()
    with AccountantApi(here, cluster="prod") as client:
        added = Controller(policy, client, several, clock, others=other_clusters(file, "prod")).cycle()
    assert (mixed.hold, added.hold) == (None, None)
    assert mixed.window is not None
    assert isinstance(added.window, FleetWindow)
    hours = {queue: gpus * 3_600_000_000 for queue, gpus in {"a": 3, "b": 1, "c": 4}.items()}
    assert added.window.usage == mixed.window.usage == hours
    assert (added.window.capacity, added.window.coverage) == (mixed.window.capacity, mixed.window.coverage)
    assert weights_in(several) == weights_in(one)
    assert weights_in(several)["c"] < weights_in(several)["a"] < weights_in(several)["b"]

    (tmp_path / "policy.yaml").write_text(policy.model_dump_json(by_alias=True))
    (tmp_path / "cluster.json").write_text(json.dumps({"items": [*map(queue_object, "abc"), setup_object()]}))
    asked = ["plan", "--policy", f"{tmp_path}/policy.yaml", "--objects", f"{tmp_path}/cluster.json"]
    asked += ["--url", here, "--cluster", "prod"]
    assert main(asked) == 1
    assert "no accountant is known for cluster 'west'" in capsys.readouterr().err


def test_one_of_two_accountants_is_cut_off_and_returns(accountants: Make, clock: VirtualClock, tmp_path: Path) -> None:
    policy = policy_of(window=WINDOW, k=1.0, usage=BOTH)
    _, here = accountants(policy, prod={"a": 3})
    west, there = accountants(policy, west={"c": 4})
    file = tmp_path / "accountants.yaml"
    file.write_text(f"clusters:\n  west:\n    url: {there}\n    token_file: {tmp_path}/token\n")
    cluster = fake_cluster(node_object("n1", gpus=GPUS))
    with AccountantApi(here, cluster="prod") as client:
        controller = Controller(policy, client, cluster, clock, others=other_clusters(file, "prod"))
        reason, message = hold_of(controller.cycle())
        assert reason == "AccountantUnavailable"
        assert message.startswith("cluster west: ")
        assert "token" in message, "it cannot be read"
        assert set(weights_in(cluster).values()) == {1}
        (tmp_path / "token").write_text("secret")
        assert controller.cycle().hold is None
        assert weights_in(cluster)["c"] < 1
        west.ledger.put_policy(policy_of([{"name": "a", "refs": ("fake:c",)}]), clock.wall_ms())
        clock.advance(MINUTE_MS)
        assert hold_of(controller.cycle())[0] == "PolicyNotInForce"


def test_a_what_if_says_that_it_replays_one_cluster(accountants: Make, clock: VirtualClock) -> None:
    policy = policy_of(window=WINDOW, usage=BOTH)
    _, here = accountants(policy, prod={"a": 3})
    with AccountantApi(here, cluster="prod") as client:
        past = history_from_ledger(client, policy, 3_600, None, clock.wall_ms())
    assert "usage of this cluster alone counts: other clusters (usage.clusters) are not replayed" in past.assumptions


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    opened = Service(Settings(data=empty_ledger.data(tmp_path / "data"), auth="off", linger_ms=0), clock)
    yield opened
    opened.close()


@pytest.fixture
def client_of(service: Service) -> Iterator[Make]:
    """Return a function that builds the controller's client of a cluster within the process."""
    with TestClient(service.app, base_url="http://127.0.0.1") as inside:

        def answer(request: httpx2.Request) -> httpx2.Response:
            sent = {"content": request.content, "headers": dict(request.headers)}
            found = inside.request(request.method, str(request.url), **sent)
            kept = {"Content-Type": found.headers.get("Content-Type", "")}
            return httpx2.Response(found.status_code, content=found.content, headers=kept)

        transport = httpx2.MockTransport(answer)
        yield lambda cluster="": AccountantApi("http://127.0.0.1", cluster=cluster, transport=transport)


@pytest.fixture
def controller(client_of: Make, clock: VirtualClock) -> Make:
    """Return a function that builds the controller of a cluster with queues a, b and c of weight 1, with that
    cluster."""

    def make(policy: Any, cluster: str) -> tuple[Controller, MemoryCluster]:
        there = fake_cluster()
        return Controller(policy, client_of(cluster), there, clock), there

    return make


@pytest.fixture
def cycle(controller: Make) -> Make:
    """Run a cycle of a new controller and return the weights."""

    def run(policy: Any, cluster: str) -> tuple[CycleReport, dict[str, float]]:
        mine, there = controller(policy, cluster)
        found = mine.cycle()
        return found, weights_in(there)

    return run


def test_usage_elsewhere_does_not_lower_a_weight_here(service: Service, clock: VirtualClock, cycle: Make) -> None:
    policy = policy_of(window=WINDOW, k=1.0)
    report(service, clock, "prod", {"a": 3, "b": 1})
    cycle(policy, "prod")  # announces the policy, which is in force from then on
    clock.advance(MINUTE_MS)
    alone, weights = cycle(policy, "prod")
    assert alone.hold is None
    assert weights["a"] < weights["b"] < weights["c"]
    report(service, clock, "staging", {"c": 4})
    shared, after = cycle(policy, "prod")
    assert after == weights
    assert shared.window.cluster == "prod"
    assert shared.window.model_copy(update={"end_ms": 0}) == alone.window.model_copy(update={"end_ms": 0})
    there, weights_there = cycle(policy, "staging")
    assert there.hold is None
    assert weights_there["c"] < weights_there["a"] == weights_there["b"]
    _, mixed = cycle(policy, "")
    assert mixed["c"] < after["c"], "without a name history mixes, as it always did"


def test_decisions_stay_apart_and_replay(service: Service, clock: VirtualClock, cycle: Make, client_of: Make) -> None:
    policy = policy_of(window=WINDOW)
    for cluster, held in (("prod", {"a": 3}), ("staging", {"b": 3})):
        report(service, clock, cluster, held)
        cycle(policy, cluster)
    clock.advance(MINUTE_MS)
    told = {cluster: cycle(policy, cluster)[0] for cluster in ("prod", "staging")}
    for cluster, at in told.items():
        found = list(client_of(cluster).decisions(clock.wall_ms(), clock.wall_ms() + 1))
        assert {decision.cluster for decision in found} == {cluster}
        (inputs,) = (decision for decision in found if decision.subject == "*")
        assert replay_weights(policy, inputs).weights == at.targets[0].weights
    everybody = list(client_of().decisions(clock.wall_ms(), clock.wall_ms() + 1))
    assert len(everybody) == sum(len(at.decisions) for at in told.values())


def test_policies_that_count_alike_do_not_contest(service: Service, clock: VirtualClock, controller: Make) -> None:
    """One cluster tries another k: both count usage by the same queues, and neither holds."""
    given = {"prod": {"k": 1.0}, "staging": {"k": 0.5, "apply": "dry-run"}}
    policies = {name: policy_of(window=WINDOW, min_coverage=0.5, **options) for name, options in given.items()}
    controllers = {name: controller(policy, name)[0] for name, policy in policies.items()}
    for name in controllers:
        report(service, clock, name, {"a": 3})
    for minute in range(6):
        held = [each.cycle().hold for each in controllers.values()]
        assert not any(held), minute
        clock.advance(MINUTE_MS)
    assert [told.policy for told in service.ledger.status().policies(0, clock.wall_ms())] == [*policies.values()], (
        "each once"
    )
    other = policy_of([{"name": "a", "refs": ("fake:b",)}, {"name": "b", "refs": ("fake:a",)}, {"name": "c"}])
    service.ledger.put_policy(other, clock.wall_ms())
    clock.advance(MINUTE_MS)
    for each in controllers.values():
        assert hold_of(each.cycle())[0] == "PolicyNotInForce", "queues of the same names are made of others"


def test_a_name_that_no_agent_reports_holds_and_says_so(service: Service, clock: VirtualClock, cycle: Make) -> None:
    report(service, clock, "prod", {"a": 3})
    held, weights = cycle(policy_of(window=WINDOW), "production")
    assert hold_of(held)[0] == "NoCapacity"
    assert "of cluster 'production': do its agents report this name?" in hold_of(held)[1]
    assert set(weights.values()) == {1}
