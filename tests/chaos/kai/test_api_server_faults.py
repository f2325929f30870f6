"""Dropped, hanging and refused answers of a real API server at random moments, with two controllers and two
accountants: at most one of each leads, one leads again within the term of the Lease, every weight that is due is
written, and no act and no record is lost."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import accountant
from fairshare.controller import policy_file as policies
from gputally.kubernetes.api_client import KubernetesCluster
from gputally.kubernetes.leader_election import LeaseTimes
from tests.chaos.accountant_process import GONE, AccountantProcess, assert_exact
from tests.chaos.replica_pair import Pair, two_accountants
from tests.deadlines import Deadline, patience_s, until
from tests.fairshare.fixed_answers_server import serving, window_of
from tests.fairshare.kai.on_a_server import add_queues, weights_of
from tests.fairshare.real.chart_roles import install
from tests.fairshare.real_api_server import served
from tests.fairshare.scheduler_kinds import KINDS
from tests.fakes.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.real.controlplane import ADMIN_TOKEN, ApiServer
from tests.real.programs import free_ports

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
FAULTS = 50
KINDS_OF_FAULT = (Fault.CUT, Fault.ANSWER_LOST, Fault.HANGS, Fault.CONFLICT, Fault.BUSY, Fault.FAILED)
REQUESTS = (" .*/leases", "GET .*/leases", "P.* .*/leases", " .*/queues", " .*/configmaps", " ")
"""Patterns of requests that get a fault. The first four are those on which terms and weights depend."""
SPACE = "faults"
TIMES = LeaseTimes()
PRICES = str(Path(accountant.__file__).parent / "samples" / "price-book.yaml")


class Controller:
    """One replica of the controller as a process."""

    def __init__(self, folder: Path, name: str, kubeconfig: Path, accountant: str, policy: Path) -> None:
        (self.port,) = free_ports(1)
        command = [sys.executable, "-m", "fairshare", "run", "--policy", str(policy), "--url", accountant]
        command += ["--kubeconfig", str(kubeconfig), "--listen", f"127.0.0.1:{self.port}", "--interval", "1s"]
        names = {
            "STATUS_NAMESPACE": SPACE, "STATUS_NAME": "gputally-fairshare", "LEASE": "gputally-fairshare",
            "IDENTITY": name,
        }  # fmt: skip
        environment = {f"GPUTALLY_FAIRSHARE_{key}": value for key, value in names.items()}
        self.log = folder / f"controller-{name}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stderr=output, env={"PATH": "/usr/bin:/bin", **environment})

    def ask(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def leads(self) -> bool:
        with contextlib.suppress(*GONE):
            return "\ngputally_fairshare_leader 1.0" in self.ask("/metrics")
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(patience_s()) == 0
        assert "Traceback" not in self.log.read_text()


def answers(replica: AccountantProcess) -> bool:
    """Whether a replica of the accountant leads. A replica that has ended starts again, as the kubelet would do it."""
    if not replica.alive():
        replica.start()
    else:
        with contextlib.suppress(*GONE):
            return replica.ask("GET", "/leading", timeout=5)[0] == 200
    return False


class Watch:
    """Looks at a pair of replicas again and again. gaps_s: how long nobody led, each time. too_long: the gaps longer
    than the term of a Lease, a retry, and one more request and retry for each fault meanwhile."""

    def __init__(self, name: str, proxy: FaultProxy, first: Callable[[], bool], second: Callable[[], bool]) -> None:
        self._name, self._proxy, self._first, self._second = name, proxy, first, second
        self.gaps_s: list[float] = []
        self.too_long: list[str] = []
        self.both = 0
        self.looks = 0

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert self.looks
        assert self.both == 0, f"two of {self._name} lead at once"

    def _look(self, over: threading.Event) -> None:
        gap: Deadline | None = None
        while not over.wait(0.1):
            first, second = self._first(), self._second()
            # The looks are not simultaneous. Only a leader before and after the look at the other one led meanwhile.
            self.both += first and second and self._first()
            self.looks += 1
            if gap is None and not (first or second):
                # One more than those to come: a request may hang as the gap begins.
                gap, faults = Deadline(TIMES.lease_s + TIMES.retry_s), len(self._proxy.spoilt) - 1
            if gap is None:
                continue
            while faults < len(self._proxy.spoilt):
                faults += 1
                gap.extend(TIMES.request_s + TIMES.retry_s)
            passed = gap.passed
            if first or second:
                self.gaps_s.append(gap.since_s)
                self.too_long += [str(gap)] if passed else []
                gap = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    (tmp_path / "api-server").mkdir()
    with served(tmp_path / "api-server") as running:
        yield running


@pytest.fixture
def proxy(server: ApiServer) -> Iterator[FaultProxy]:
    with fault_proxy(server.url, ssl.create_default_context(cafile=server.ca_file)) as running:
        yield running


class Acts:
    """Books adjustments at the accountant that leads. confirmed: the reasons of those that were answered."""

    def __init__(self, accountants: Pair) -> None:
        self._accountants = accountants
        self.confirmed: list[str] = []

    def book(self, reason: str) -> None:
        """Send one act until a replica confirms it. One whose answer was lost is refused as booked already."""
        body = {"month": "2026-01", "team": "ml", "amount": "-1.00", "reason": reason, "approved_by": "bo"}

        def booked() -> bool:
            leader = self._accountants.leading()
            if leader is None:
                return False
            with contextlib.suppress(*GONE):
                status, answer = leader.ask("POST", "/v1/adjustments", json.dumps(body).encode(), timeout=10)
                assert status in (200, 409, 503), answer
                return status != 503
            return False

        until(booked, self._accountants.words, 90)
        self.confirmed.append(reason)

    def recorded(self) -> Counter[str]:
        status, answer = self._accountants.leader().ask("GET", "/v1/adjustments")
        assert status == 200
        return Counter(line["reason"] for line in answer)


def test_fifty_faults_of_an_api_server(
    tmp_path: Path, zygote: subprocess.Popen[str], server: ApiServer, proxy: FaultProxy, capsys: Any
) -> None:
    chance = random.Random(35)
    real = KubernetesCluster.connect(KINDS, server.kubeconfig)
    add_queues(real, "a", "b")
    install(server, tmp_path, SPACE, {})
    token = server.token(SPACE, "gputally-fairshare")
    controllers_way = server.kubeconfig_for(token, tmp_path, proxy.url)
    (tmp_path / "admin").mkdir()
    accountants_way = server.kubeconfig_for(ADMIN_TOKEN, tmp_path / "admin", proxy.url)
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "schema: 1\ntargets: {kai: {mode: weight, apply: enforce}}\nbounds: {interval: 0}\n"
        "queues: [{name: a, refs: ['kai:a']}, {name: b, refs: ['kai:b']}]\n"
    )
    version = policies.load(policy)[0].version()
    used = {"a": 0.8, "b": 0.2}
    known = {"version": version, "effective_ms": 0, "policy": {"queues": [{"name": "x"}]}}
    routes = {"/v1/windows": window_of(used, 16 * 3_600_000_000, version)}
    taking = {"/v1/policy": lambda _: known, "/v1/decisions": lambda _: {}}

    with contextlib.ExitStack() as stack:
        told = stack.enter_context(serving(routes, taking))
        controllers = [Controller(tmp_path, name, controllers_way, told, policy) for name in ("x", "y")]
        for controller in controllers:
            stack.callback(controller.kill)
        teams = tmp_path / "teams.yaml"
        teams.write_text("schema: 1\nqueues:\n  - {name: ml, team: ml}\n")
        accountants = stack.enter_context(
            two_accountants(
                tmp_path, zygote, accountants_way, "accountant", own_volume=True, prices=PRICES, policy=str(teams)
            )
        )
        acts = Acts(accountants)

        def due_weights_written() -> bool:
            weights = dict(zip("ab", weights_of(real, "a", "b"), strict=True))
            most, least = sorted(used, key=lambda name: -used[name])
            return weights[most] < weights[least]

        def words() -> str:
            return "".join(controller.log.read_text()[-1500:] for controller in controllers) + accountants.words()

        until(due_weights_written, words, 60)
        accountants.leader()
        of_controllers = Watch("the controllers", proxy, *(controller.leads for controller in controllers))
        of_accountants = Watch("the accountants", proxy, *(partial(answers, one) for one in accountants.replicas))
        with of_controllers.going_on(), of_accountants.going_on():
            for number in range(FAULTS):
                before = len(proxy.spoilt)
                proxy.spoil(chance.choice(REQUESTS), chance.choice(KINDS_OF_FAULT))
                until(lambda before=before: len(proxy.spoilt) > before, "no request comes", 60)
                if number % 10 == 4:
                    acts.book(f"act {number}")
                    accountants.work(2)
                if number % 5 == 4:
                    until(due_weights_written, lambda: f"the weights do not follow usage:\n{words()}", 90)
                    used["a"], used["b"] = used["b"], used["a"]
                # The next fault comes at a random moment: after some more requests.
                seen = len(proxy.seen) + chance.randint(0, 20)
                until(lambda seen=seen: len(proxy.seen) >= seen, "no request comes", 60)
            proxy.heal()
            until(due_weights_written, words, 90)
            until(lambda: any(controller.leads() for controller in controllers), words)
            until(lambda: all("ok" in controller.ask("/readyz") for controller in controllers), words)
        accountants.work(2)
        recorded = acts.recorded()
        assert {act: recorded[act] for act in acts.confirmed} == dict.fromkeys(acts.confirmed, 1)
        assert_exact(accountants.sender, accountants.leader())
        for controller in controllers:
            controller.end()
    with capsys.disabled():
        kinds = Counter(fault.name for _, fault in proxy.spoilt)
        print(f"\n{dict(kinds)} of {len(proxy.seen)} requests; nobody led for")
        for watch in (of_controllers, of_accountants):
            print(f"  {[round(gap, 1) for gap in watch.gaps_s]} s in {watch.looks} looks")
    assert len(proxy.spoilt) == FAULTS
    assert of_controllers.too_long + of_accountants.too_long == []
