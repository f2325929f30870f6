"""The extender with 8 clients at 20,000 pods on 2,500 nodes, while a cycle runs every second and pods change.

Server and clients are processes of their own, as in life. The clients are connections of one thread, which sends
requests that were made before and reads the answers, so that the time is the server's: from the last byte of a request
to the last of its answer. Every request asks about another pod and names all nodes. The goal is a 99th percentile of
50 ms, on a machine with two free cores. On a loaded machine only the processor time of an answer says something: it is
that of the thread that answers, without the other threads."""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from accountant.wire.policy_models import Policy
from fairshare.composition import THREAD_SWITCH_S, ShortCollections
from fairshare.controller.control_loop import Controller
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.extender_views import ExtenderViews
from fairshare.core.queues_and_weights import Pod
from fairshare.http_server import serve_extender
from fairshare.schedulers.kube_scheduler.extender import KubeSchedulerExtender
from fairshare.targets.pod_index import PodIndex
from gputally.base.clock import SystemClock
from gputally.kubernetes.objects import GPU, NODE
from tests.bench.cycle import Ledger, Shelf
from tests.bench.figure import Figure, Goal, quantile
from tests.deadlines import patience_s

QUEUES, NODES, PODS, CLIENTS, REQUESTS = 1_000, 2_500, 20_000, 8, 200
"""Requests are per client."""
CHANGES_PER_S = 50
PAUSE_S = 1.0
"""Between two cycles; thirty times as often as in service."""
GOAL_MS = 50.0
CPU_GOAL_MS = 2.0


def pods() -> list[Pod]:
    """Build the pods of jobs with 8 pods each, of which one in ten waits."""
    return [
        Pod(
            f"uid-{i}", f"team-{i // 8 % QUEUES}", f"worker-{i}", 1.0, node="" if i % 10 == 9 else f"n{i % NODES}",
            ref=f"policy:q{i // 8 % QUEUES}", gang=f"Job/ns/{i // 8}", held=i % 10 != 9, created_ms=1, started_ms=1,
        )
        for i in range(PODS)
    ]  # fmt: skip


def serve() -> None:
    """Serve until the standard input ends. Write the URL first, and in the end the seconds of processor time of every
    answer."""
    sys.setswitchinterval(THREAD_SWITCH_S)
    policy = Policy.model_validate(
        {"queues": [{"name": f"q{i}", "deserved": 20, "refs": [f"policy:q{i}"]} for i in range(QUEUES)]}
    )
    conditions = [{"type": "Ready", "status": "True"}]
    nodes: list[Mapping[str, Any]] = [
        {"metadata": {"name": f"n{i}"}, "status": {"allocatable": {GPU: "16"}, "conditions": conditions}}
        for i in range(NODES)
    ]
    index, clock, stop = PodIndex(), SystemClock(), threading.Event()
    everything = pods()
    for pod in everything:
        index.change(pod.uid, pod)
    views = ExtenderViews(index, clock)
    collections = ShortCollections()

    def observe(report: CycleReport) -> None:
        views.observe(report, policy)
        collections.after_cycle()

    controller = Controller(policy, Ledger(policy), Shelf({NODE: nodes}), clock, pods=index.pods, observe=observe)
    controller.cycle()
    extender = KubeSchedulerExtender(views.view, clock)
    spent: list[float] = []
    answer = extender.prioritize

    def timed(content: bytes) -> object:
        started = time.thread_time()
        try:
            return answer(content)
        finally:
            spent.append(time.thread_time() - started)

    extender.prioritize = timed  # type: ignore[method-assign, assignment]  # measured from inside, without the network

    def change() -> None:
        number = 0
        while not stop.wait(1 / CHANGES_PER_S):
            pod = everything[number % PODS]
            index.change(pod.uid, replace(pod, priority=number))
            number += 1

    def cycle() -> None:
        while True:
            controller.cycle()
            if stop.wait(PAUSE_S):
                return

    threads = [threading.Thread(target=change), threading.Thread(target=cycle)]
    with serve_extender("127.0.0.1", 0, extender.routes) as url:
        for thread in threads:
            thread.start()
        print(url, flush=True)
        sys.stdin.read()
        stop.set()
        for thread in threads:
            thread.join()
    print(json.dumps(spent), flush=True)


class Client:
    """One connection, which sends its requests one after the other."""

    def __init__(self, host: str, port: int, number: int) -> None:
        self._requests = [request(number * REQUESTS + i) for i in range(REQUESTS)]
        self._sent_s = 0.0
        self._parts: list[bytes] = []
        self._missing: int | None = None
        self.socket = socket.create_connection((host, port), timeout=patience_s(60))

    def send(self) -> bool:
        """Send the next request; return whether there was one."""
        if not self._requests:
            return False
        self._parts, self._missing = [], None
        self.socket.sendall(self._requests.pop())
        self._sent_s = time.monotonic()
        return True

    def receive(self) -> float | None:
        """Read what has come. Return the seconds that the answer took; None if it is not complete."""
        self._parts.append(self.socket.recv(1 << 20))
        assert self._parts[-1], "the server has closed the connection"
        if self._missing is None:
            head, end, _ = b"".join(self._parts).partition(b"\r\n\r\n")
            if not end:
                return None
            assert head.startswith(b"HTTP/1.1 200 "), head
            self._missing = len(head) + len(end) + int(head.lower().partition(b"content-length:")[2].split()[0])
        if sum(map(len, self._parts)) < self._missing:
            return None
        taken = time.monotonic() - self._sent_s
        body = b"".join(self._parts)
        assert body.count(b'"Score":') == NODES > body.count(b'"Score":0')
        return taken


def request(number: int) -> bytes:
    pod = {
        "metadata": {
            "name": f"new-{number}", "namespace": "team-1", "uid": f"new-{number}",
            "labels": {"gputally.dev/queue": f"q{number % QUEUES}"},
        },
        "spec": {"containers": [{"name": "c", "resources": {"limits": {GPU: "1"}}}]},
    }  # fmt: skip
    body = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": [f"n{i}" for i in range(NODES)]}).encode()
    head = f"POST /scheduler/prioritize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def ask(url: str) -> list[float]:
    """Send the requests of all clients, and return the seconds that each took."""
    parts = urlsplit(url)
    taken: list[float] = []
    with selectors.DefaultSelector() as selector:
        clients = [Client(str(parts.hostname), int(parts.port or 0), number) for number in range(CLIENTS)]
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.send()
        while selector.get_map():
            ready = selector.select(patience_s(60))
            assert ready, "no answer"
            for key, _ in ready:
                seconds = key.data.receive()
                if seconds is not None:
                    taken.append(seconds)
                    if not key.data.send():
                        selector.unregister(key.data.socket)
                        key.data.socket.close()
    return taken


def measure() -> Sequence[Figure]:
    code = "from tests.bench.extender import serve; serve()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        taken = ask(url)
        server.stdin.close()
        spent = json.loads(server.stdout.readline())
    name = f"extender, {CLIENTS} clients, {PODS:,} pods, {NODES:,} nodes, cycles run"
    return [
        Figure(f"{name}, 99th percentile", quantile(taken, 0.99) * 1e3, "ms", goal=Goal(GOAL_MS)),
        Figure(f"{name}, median", quantile(taken, 0.5) * 1e3, "ms"),
        Figure("one answer, processor time, median", quantile(spent, 0.5) * 1e3, "ms", goal=Goal(CPU_GOAL_MS)),
        Figure("one answer, processor time, 99th percentile", quantile(spent, 0.99) * 1e3, "ms"),
    ]
