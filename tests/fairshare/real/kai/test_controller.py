"""The installed controller: with exactly the chart's rights, with admission policies and conflicts, and with an API
server that goes away."""

from __future__ import annotations

import gc
import json
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fairshare.controller import policy_file as policies
from fairshare.controller.control_loop import ALONE
from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Gang
from fairshare.preemption.eviction import EvictionCheck, stop_victim
from fairshare.preemption.preemption_types import Victim
from fairshare.schedulers.kai.kinds import QUEUE
from fairshare.targets.status_config_map import StatusObject
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import SystemClock, VirtualClock
from gputally.base.errors import ClusterError, ClusterRefused
from gputally.kubernetes.api_client import KubernetesCluster, connect_for_election
from gputally.kubernetes.leader_election import Election, LeaseTimes, Term
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.objects import CONFIG_MAP, GPU, POD
from tests.deadlines import until
from tests.fairshare.builders import object_of
from tests.fairshare.conftest import Make
from tests.fairshare.fixed_answers_server import serving, window_of
from tests.fairshare.kai.objects import kai_policy
from tests.fairshare.kai.on_a_server import add_queues, weights_of
from tests.fairshare.observations import results_of
from tests.fairshare.real.conftest import Request
from tests.fairshare.scheduler_kinds import KINDS
from tests.fakes.fault_proxy import Fault, fault_proxy
from tests.plugin_cases import plugin_cases
from tests.real.controlplane import ADMIN_TOKEN, ApiServer, frozen, killed

pytestmark = pytest.mark.real
STATUS = StatusObject("gputally", "gputally-fairshare")
CASES = {name: cases for name, cases in plugin_cases("fairshare", "object_cases").items() if name != "kai"}


@contextmanager
def running(policy: Path, accountant: str, kubeconfig: Path, identity: str, *options: str) -> Iterator[Any]:
    """Run the controller's program with its Lease. Its log is beside the policy. It has to exit with 0 after
    SIGTERM."""
    command = [sys.executable, "-m", "fairshare", "run", "--policy", str(policy), "--url", accountant]
    command += ["--kubeconfig", str(kubeconfig), "--listen", "127.0.0.1:0", *options]
    names = {"STATUS_NAMESPACE": "gputally", "STATUS_NAME": STATUS.name, "LEASE": STATUS.name, "IDENTITY": identity}
    environment = {f"GPUTALLY_FAIRSHARE_{key}": value for key, value in names.items()}
    with (policy.parent / "log").open("wb") as output:
        program = subprocess.Popen(command, stderr=output, env={"PATH": "/usr/bin:/bin", **environment})
        try:
            yield program
            program.send_signal(signal.SIGTERM)
            assert program.wait(15) == 0
        finally:
            program.kill()
            program.wait()
    assert "Traceback" not in (policy.parent / "log").read_text()


def test_the_charts_rights_suffice(
    installed: Path, real: KubernetesCluster, accountant: Any, controller_of: Make
) -> None:
    """Every target is read and written with exactly the chart's role, and everything else is refused."""
    mine = KubernetesCluster.connect(KINDS, installed)
    add_queues(real, "rb-a", "rb-b")
    for name in ("rb-c", "rb-d"):
        for cases in CASES.values():
            real.apply(object_of(cases.UNWEIGHTED[0], name, cases.UNWEIGHTED[1]), field_manager="gitops")
    queues = [
        {"name": "a", "refs": ["kai:rb-a"]}, {"name": "b", "refs": ["kai:rb-b"]},
        {"name": "c", "refs": [*(f"{name}:rb-c" for name in CASES), "policy:c"]},
        {"name": "d", "refs": [*(f"{name}:rb-d" for name in CASES)]},
    ]  # fmt: skip
    enforce = {"apply": "enforce"}
    targets = {"kai": enforce, **{name: enforce | cases.TARGET for name, cases in CASES.items()}}
    policy = kai_policy(queues, targets=targets)
    accountant.spend(a=0.5, c=0.3)
    pods: list[Any] = []
    mine.scan(POD, pods.append)
    report = controller_of(policy, mine, status_object=STATUS, pods=tuple).cycle()
    assert results_of(report) == dict.fromkeys("abcd", "applied")
    assert {target.target: dict(target.degraded) for target in report.targets} == {
        "kai": {}, "kube-scheduler": {}, **{name: {} for name in CASES},
    }  # fmt: skip
    status = mine.get(CONFIG_MAP, STATUS.name, STATUS.namespace)["data"]
    assert {key.partition(".")[0] for key in status} >= {"kai", *CASES, "UsageFresh"}
    for forbidden in (
        lambda: mine.get(QUEUE, "rb-a"),
        lambda: mine.get(CONFIG_MAP, "other", "gputally"),
        lambda: mine.create(object_of(QUEUE, "new", {}), field_manager="x"),
        lambda: mine.evict("any", "default", "uid"),
    ):
        with pytest.raises(ClusterRefused, match="cannot"):
            forbidden()


def test_pods_are_evicted_with_the_charts_rights_alone(
    installed: Path, preempting: Path, real: KubernetesCluster
) -> None:
    container = {"name": "c", "image": "x", "resources": {"limits": {GPU: "1"}}}
    for name in ("pr-a", "pr-b"):
        real.create(object_of(POD, name, {"containers": [container]}, namespace="default"), field_manager="t")
    results = []
    for name, rights in (("pr-a", installed), ("pr-b", preempting)):
        mine = KubernetesCluster.connect(KINDS, rights)
        pod = read_pod(real.get(POD, name, "default"))
        gang = Gang("a", POD, "default", name, pod.uid, 1.0, 1.0, 1.0, pods=(pod,))
        victim = Victim(gang, (pod,), 1.0, 0.0, True, "idle", "a", "because")
        veto = EvictionCheck(mine).refusal(victim)
        results.append((veto.kind if veto is not None else None, stop_victim(mine, victim, "d", 0).result))
    assert results == [("refused", "refused"), (None, "stopped")]
    assert [pod["metadata"]["name"] for pod in real.list(POD) if pod["metadata"]["name"].startswith("pr-")] == ["pr-a"]
    real.evict("pr-a", "default", real.get(POD, "pr-a", "default")["metadata"]["uid"], grace_s=0)


def test_an_admission_policy_refuses_one(
    real: KubernetesCluster, ask: Request, accountant: Any, controller_of: Make
) -> None:
    """A real rule in CEL: its message reaches the condition, and the queue gets an event."""
    add_queues(real, "vap-a", "vap-b", "vap-c")
    rule = {
        "expression": "object.metadata.name != 'vap-a' || !has(object.spec.resources.gpu.overQuotaWeight)",
        "message": "vap-a is frozen until Monday",
    }
    match = {"apiGroups": [QUEUE.api_version.partition("/")[0]], "apiVersions": ["v2"], "resources": ["queues"]}
    constraints = {"resourceRules": [{**match, "operations": ["UPDATE"]}]}
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
    spec = {"failurePolicy": "Fail", "matchConstraints": constraints, "validations": [rule]}
    ask("POST", f"{path}ies", {"metadata": {"name": "frozen"}, "spec": spec})
    binding = {"policyName": "frozen", "validationActions": ["Deny"]}
    ask("POST", f"{path}ybindings", {"metadata": {"name": "frozen"}, "spec": binding})
    try:

        def denied() -> bool:
            try:
                wanted = object_of(QUEUE, "vap-a", {"resources": {"gpu": {"overQuotaWeight": 1}}})
                real.apply(wanted, field_manager="probe", dry_run=True)
            except ClusterRefused:
                return True
            return False

        until(denied, "the policy is not in force")
        policy = kai_policy([{"name": f"vap-{x}", "refs": [f"kai:vap-{x}"]} for x in "abc"])
        accountant.spend(**{"vap-a": 0.5})
        report = controller_of(policy, real, status_object=StatusObject("default", "vap")).cycle()
        assert results_of(report) == {"vap-a": "refused", "vap-b": "applied", "vap-c": "applied"}
        available = {c.type: c for c in report.targets[0].conditions}["Available"]
        assert (available.status, available.reason) == ("False", "Refused")
        assert "vap-a is frozen until Monday" in available.message
        listed = ask("GET", "/apis/events.k8s.io/v1/namespaces/default/events")["items"]
        mine = [e for e in listed if e["regarding"].get("name") == "vap-a"]
        assert [e["reason"] for e in mine] == ["WriteRefused"]
    finally:
        ask("DELETE", f"{path}ybindings/frozen")
        ask("DELETE", f"{path}ies/frozen")


def test_an_api_server_that_is_killed(
    server: ApiServer, real: KubernetesCluster, accountant: Any, clock: VirtualClock, controller_of: Make
) -> None:
    """Cycles meanwhile report it and decide nothing; later cycles, and the watch of pods, continue by themselves."""
    add_queues(real, "fz-a", "fz-b")
    policy = kai_policy([{"name": f"fz-{x}", "refs": [f"kai:fz-{x}"]} for x in "ab"])
    accountant.spend(**{"fz-a": 0.9, "fz-b": 0.1})
    used = KubernetesCluster.connect(KINDS, server.kubeconfig, timeout_s=5.0)
    where = StatusObject("default", "fz")
    controller = controller_of(policy, used, status_object=where)
    pods: Reflector[dict[str, Any], str] = Reflector(
        used.api(), POD.path(), dict, lambda pod: str(pod["metadata"]["name"]), now_ms=clock.monotonic_ms
    )
    controller.cycle()
    pods.sync()
    before = weights_of(real, "fz-a", "fz-b")
    with killed(server):
        for _ in range(3):
            clock.advance(10_000)
            away = controller.cycle()
            assert [t.conditions[0].reason for t in away.targets] == ["Unavailable"]
            assert away.targets[0].weights == ()
        with pytest.raises(ClusterError, match="refused"):
            pods.follow()
    assert weights_of(real, "fz-a", "fz-b") == before
    accountant.spend(**{"fz-a": 0.5, "fz-b": 0.5})
    back = controller.later()
    assert back.targets[0].degraded == {}
    assert set(results_of(back).values()) == {"applied"}
    assert weights_of(real, "fz-a", "fz-b") != before
    told = real.get(CONFIG_MAP, where.name, where.namespace)["data"]
    assert json.loads(told["kai.Available"])["status"] == "True"
    pod = object_of(POD, "fz-pod", {"containers": [{"name": "c", "image": "x"}]}, namespace="default")
    real.create(pod, field_manager="t")
    stop = threading.Event()
    threading.Thread(target=pods.run, args=(stop,), daemon=True).start()
    until(lambda: "fz-pod" in pods.values().values(), "the new pod is seen")
    stop.set()


def test_thirty_seconds_without_server(
    installed: Path, server: ApiServer, real: KubernetesCluster, tmp_path: Path
) -> None:
    """The program with its Lease and the chart's rights, with a fake accountant and without an API server."""
    add_queues(real, "kl-a", "kl-b")
    file = tmp_path / "policy.yaml"
    file.write_text(
        "schema: 1\ntargets: {kai: {mode: weight, apply: enforce}}\nbounds: {interval: 0}\n"
        "queues: [{name: kl-a, refs: ['kai:kl-a']}, {name: kl-b, refs: ['kai:kl-b']}]\n"
    )
    version = policies.load(file)[0].version()
    used = {"kl-a": 0.8, "kl-b": 0.2}
    hour_us = 16 * 3_600_000_000
    known = {"version": version, "effective_ms": 0, "policy": {"queues": [{"name": "x"}]}}
    routes = {"/v1/windows": window_of(used, hour_us, version)}
    taking = {"/v1/policy": lambda _: known, "/v1/decisions": lambda _: {}}
    log = tmp_path / "log"

    def events(name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def leads(url: str) -> float:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return float(
            next(line for line in text.splitlines() if line.startswith("gputally_fairshare_leader ")).split()[1]
        )

    with serving(routes, taking) as told, running(file, told, installed, "kl", "--interval", "1s") as program:
        until(lambda: weights_of(real, "kl-b")[0] > weights_of(real, "kl-a")[0] > 0, "no weight is published")
        url = events("serving")[0]["url"]
        until(lambda: leads(url) == 1, "it does not lead")
        with killed(server):
            applied, began = len(_applied(events("weight"))), time.monotonic()
            used |= {"kl-a": 0.2, "kl-b": 0.8}
            seen = set()

            def over() -> bool:
                assert program.poll() is None
                with urllib.request.urlopen(f"{url}/livez", timeout=5) as answer:
                    assert answer.status == 200
                gone_s = time.monotonic() - began
                if gone_s > 15:
                    seen.add(leads(url))
                return gone_s >= 30

            until(over, "time stands still", 60)
            assert seen == {0}
            assert len(_applied(events("weight"))) == applied
        until(lambda: leads(url) == 1, "it does not lead again")
        until(lambda: weights_of(real, "kl-a")[0] > weights_of(real, "kl-b")[0], "it does not go on")


def _applied(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["result"] == "applied"]


QUICK = LeaseTimes(lease_s=3, renew_s=2, retry_s=1)


class Replica:
    """A leader election in a thread."""

    def __init__(
        self, server: ApiServer, identity: str, lease: str, kubeconfig: Path | None = None, times: LeaseTimes = QUICK
    ) -> None:
        connect = partial(connect_for_election, kubeconfig or server.kubeconfig)
        self.election = Election(lease, "gputally", identity, SystemClock(), connect, times)
        self.stop = threading.Event()
        tasks = BackgroundTasks(SystemClock())
        self.thread = tasks.start("lease", self.election.run, self.stop, list[Exception]().append)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def replicas(server: ApiServer, installed: Path) -> Iterator[Callable[[str, str], Replica]]:
    started: list[Replica] = []

    def start(identity: str, lease: str) -> Replica:
        # The chart's role knows one Lease by name.
        started.append(Replica(server, identity, lease, installed if lease == STATUS.name else None))
        return started[-1]

    yield start
    for replica in started:
        replica.end()


def test_of_two_replicas_one_leads_and_the_other_takes_over(replicas: Callable[[str, str], Replica]) -> None:
    one, two = replicas("one", STATUS.name), replicas("two", STATUS.name)

    def leaders() -> list[str]:
        return [name for name, replica in (("one", one), ("two", two)) if replica.election.term()]

    (first,) = until(leaders, "nobody leads")
    leader, other = (one, two) if first == "one" else (two, one)
    assert other.election.term() is None
    leader.end()  # gives the Lease back
    until(other.election.term, "nobody takes over", 5)
    assert leader.election.term() is None


def test_who_cannot_renew_does_not_lead(server: ApiServer, replicas: Callable[[str, str], Replica]) -> None:
    only = replicas("only", "frozen")
    until(only.election.term, "nobody leads")
    with frozen(server):
        until(lambda: only.election.term() is None, "it believes in a lease that has run out", 6)
        until(lambda: only.election.fault, "it does not say why", 10)
    until(only.election.term, "it does not come back")
    assert only.election.fault == ""


def test_a_standby_goes_on_where_the_leader_ended(
    real: KubernetesCluster, accountant: Any, controller_of: Make
) -> None:
    add_queues(real, "sb-a", "sb-b")
    policy = kai_policy([{"name": f"sb-{x}", "refs": [f"kai:sb-{x}"]} for x in "ab"])
    accountant.spend(**{"sb-a": 0.9, "sb-b": 0.1})
    where = StatusObject("default", "standby")
    acting = {"first": True}
    first = controller_of(policy, real, status_object=where, term=lambda: ALONE if acting["first"] else None)
    second = controller_of(policy, real, status_object=where, term=lambda: None if acting["first"] else ALONE)
    looking = second.cycle()  # announces no policy: usage is still counted under no policy
    assert (looking.leading, results_of(looking), weights_of(real, "sb-a")) == (False, {}, [0])
    first.cycle()
    published = weights_of(real, "sb-a", "sb-b")
    assert published[0] < published[1]
    acting["first"] = False
    assert results_of(first.later()) == {}
    taken_over = second.cycle()
    assert taken_over.leading
    assert not [event for event in taken_over.events if event.name == where.name]  # said already
    assert weights_of(real, "sb-a", "sb-b") == published or set(results_of(taken_over).values()) == {"applied"}


def test_the_program_takes_and_gives_back_the_lease(
    installed: Path, server: ApiServer, real: KubernetesCluster, tmp_path: Path, ask: Request
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema: 1\nqueues: [{name: a, refs: ['kai:none']}]\n")
    path = f"/apis/coordination.k8s.io/v1/namespaces/gputally/leases/{STATUS.name}"

    def holder() -> str | None:
        return ask("GET", path)["spec"].get("holderIdentity")

    with running(policy, "http://127.0.0.1:1", installed, "program", "--extender-listen", "127.0.0.1:0"):
        until(lambda: holder() == "program", "it does not take the Lease")
    assert not holder()
    assert '"event": "stopping"' in (tmp_path / "log").read_text()


def test_a_dropped_connection_ends_no_term_and_leaves_nothing_behind_that_ends_the_next(
    server: ApiServer, installed: Path
) -> None:
    """Not even when the garbage collector finds it. installed: the namespace of the Lease."""
    with fault_proxy(server.url, ssl.create_default_context(cafile=server.ca_file)) as proxy:
        way = server.kubeconfig_for(ADMIN_TOKEN, server.folder, proxy.url)
        calm = LeaseTimes(lease_s=15, renew_s=10, retry_s=1)
        one, two = (Replica(server, name, "dropped", way, calm) for name in ("one", "two"))

        def leading() -> list[Term]:
            return [term for replica in (one, two) if (term := replica.election.term()) is not None]

        (first,) = until(leading, "nobody leads")
        for fault in (Fault.CUT, Fault.ANSWER_LOST, Fault.FAILED, Fault.CUT):
            for request in ("GET .*/dropped", "P.* .*/dropped"):
                with proxy.spoiling(request, fault, 3):
                    until(lambda: not proxy.waiting, "no request comes")
                renewals = len(proxy.seen)
                until(lambda renewals=renewals: len(proxy.seen) > renewals + 6, "no request comes")
                gc.collect()
                assert leading() == [first]
        for replica in (one, two):
            replica.end()
