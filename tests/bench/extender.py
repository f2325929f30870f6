"""The extender with 8 clients at 20,000 pods on 2,500 nodes, while a cycle runs every second and pods change.

Server and clients are processes of their own, as in life. Every request asks about another pod and names all nodes. The
goal is a 99th percentile of 50 ms, on a machine with two free cores. On a loaded machine only the processor time of an
answer says something: it is that of the thread that answers, without the other threads."""

from __future__ import annotations

import gc
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from accountant.wire.policy_models import Policy
from fairshare.composition import THREAD_SWITCH_S
from fairshare.controller.control_loop import Controller
from fairshare.controller.kube_scheduler_extender import Extender, ExtenderViews
from fairshare.controller.pod_index import PodIndex
from fairshare.core.queues_and_weights import Pod
from fairshare.http_server import serve_extender
from gputally.base.clock import SystemClock
from gputally.kubernetes.objects import GPU, NODE
from tests.bench.cycle import Ledger, Shelf
from tests.bench.figure import Figure, Goal, quantile
from tests.deadlines import patience_s

QUEUES, NODES, PODS, CLIENTS, REQUESTS = 1_000, 2_500, 20_000, 8, 40
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
    controller = Controller(
        policy,
        Ledger(policy),
        Shelf({NODE: nodes}),
        clock,
        pods=index.pods,
        observe=lambda report: views.observe(report, policy),
    )
    controller.cycle()
    gc.freeze()
    extender = Extender(views.view, clock)
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
    with serve_extender("127.0.0.1", 0, extender) as url:
        for thread in threads:
            thread.start()
        print(url, flush=True)
        sys.stdin.read()
        stop.set()
        for thread in threads:
            thread.join()
    print(json.dumps(spent), flush=True)


def ask(url: str, client: int) -> list[float]:
    """Send the requests of one client, and return the seconds that each took."""
    parts = urlsplit(url)
    names = [f"n{i}" for i in range(NODES)]
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=patience_s(60))
    taken = []
    for i in range(REQUESTS):
        pod = {
            "metadata": {
                "name": f"new-{client}-{i}", "namespace": "team-1", "uid": f"new-{client}-{i}",
                "labels": {"gputally.dev/queue": f"q{(client * REQUESTS + i) % QUEUES}"},
            },
            "spec": {"containers": [{"name": "c", "resources": {"limits": {GPU: "1"}}}]},
        }  # fmt: skip
        body = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": names})
        started = time.monotonic()
        connection.request("POST", "/scheduler/prioritize", body)
        answer = connection.getresponse()
        scored = json.loads(answer.read())
        taken.append(time.monotonic() - started)
        assert answer.status == 200
        assert max(each["Score"] for each in scored) > 0
    connection.close()
    return taken


def measure() -> Sequence[Figure]:
    code = "from tests.bench.extender import serve; serve()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with ThreadPoolExecutor(CLIENTS) as pool:
            taken = [seconds for part in pool.map(ask, [url] * CLIENTS, range(CLIENTS)) for seconds in part]
        server.stdin.close()
        spent = json.loads(server.stdout.readline())
    name = f"extender, {CLIENTS} clients, {PODS:,} pods, {NODES:,} nodes, cycles run"
    return [
        Figure(f"{name}, 99th percentile", quantile(taken, 0.99) * 1e3, "ms", goal=Goal(GOAL_MS)),
        Figure(f"{name}, median", quantile(taken, 0.5) * 1e3, "ms"),
        Figure("one answer, processor time, median", quantile(spent, 0.5) * 1e3, "ms", goal=Goal(CPU_GOAL_MS)),
        Figure("one answer, processor time, 99th percentile", quantile(spent, 0.99) * 1e3, "ms"),
    ]
