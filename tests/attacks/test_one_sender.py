"""One sender cannot stop the others: 1,000 nodes report while another address tries to exhaust the accountant.

No node's batch is refused or answered later than five seconds (on an idle machine), and the accountant stays within its
memory limit."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import msgspec
import pytest

from tests.attacks.conftest import Running
from tests.deadlines import patience_s
from tests.usage_records import batch, interval, pod_holder

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
NODES = 1_000
SENDERS = 8
AGAIN = 10
"""Every so many nodes report a second minute."""
PATIENCE_S = 5.0
MEMORY_MIB = 1_500
ATTACKER = "127.0.0.66"
MINUTE_MS = 60_000


def minute_of(node: int, minute: int) -> bytes:
    """Build one minute of the eight GPUs of a node."""
    begin = (int(time.time() * 1000) // MINUTE_MS - 60 + minute) * MINUTE_MS
    holder = pod_holder("", "vision", f"pod-{node}")
    rows = [
        interval(begin, f"GPU-{node}-{gpu}", holder, span_ms=MINUTE_MS, busy_us=MINUTE_MS * 500) for gpu in range(8)
    ]
    epoch, first_seq = f"01930000-0000-7000-8000-{node:012d}", minute * 8 + 1
    return msgspec.json.encode(batch(rows, cluster="prod", node=f"node-{node}", epoch=epoch, first_seq=first_seq))


class Attack:
    """The requests of one address until it is stopped; each should meet a refusal or a closed connection."""

    def __init__(self, url: str) -> None:
        parsed = httpx2.URL(url)
        self._to = (parsed.host, parsed.port or 0)
        self._url = url
        self._over = threading.Event()
        self.done = 0

    def _dial(self) -> socket.socket:
        return socket.create_connection(self._to, timeout=5, source_address=(ATTACKER, 0))

    def half_open(self) -> None:
        with contextlib.ExitStack() as kept:
            for number in range(300):
                one = kept.enter_context(self._dial())
                if number % 2:
                    one.sendall(b"GET / HTTP/1.1\r\nX: ")
            self._over.wait(3)

    def trickle(self) -> None:
        head = b"POST /v1/usage HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer agent\r\nContent-Length: 8000000\r\n\r\n"
        with contextlib.ExitStack() as kept:
            slow = [kept.enter_context(self._dial()) for _ in range(80)]
            for one in slow:
                one.sendall(head)
            while slow and not self._over.wait(0.2):
                for one in slow[:]:
                    try:
                        one.sendall(b"x")
                    except OSError:
                        slow.remove(one)

    def bombs(self) -> None:
        bomb = gzip.compress(b'{"cluster": "' + b"x" * 58_000_000 + b'"}', 9)
        deep = b"[" * 1_000_000

        def send(raw: bytes, **headers: str) -> None:
            transport = httpx2.HTTPTransport(local_address=ATTACKER)
            with httpx2.Client(transport=transport, timeout=60) as client, contextlib.suppress(httpx2.HTTPError):
                given = {"Authorization": "Bearer agent", **headers}
                answer = client.post(self._url + "/v1/usage", content=raw, headers=given)
                assert answer.status_code < 500 or answer.json()["type"].endswith("/busy"), answer.text

        with ThreadPoolExecutor(24) as pool:
            for _ in range(24):
                pool.submit(send, bomb, **{"Content-Encoding": "gzip"})
            pool.submit(send, deep)

    def _again(self, act: Callable[[], None]) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                act()
            self.done += 1

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._again, args=(act,)) for act in (self.half_open, self.trickle, self.bombs)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()


def test_a_thousand_nodes_report_in_time_whatever_another_does(running: Running) -> None:
    attack = Attack(running.url)
    late: list[float] = []
    refused: list[Any] = []

    def report(sender: int) -> None:
        with httpx2.Client(base_url=running.url, timeout=30) as client:
            for minute, every in enumerate((1, AGAIN)):
                for node in range(sender * every, NODES, SENDERS * every):
                    raw, token = minute_of(node, minute), f"Bearer node-{node}"
                    started = time.monotonic()
                    answer = client.post("/v1/usage", content=raw, headers={"Authorization": token})
                    late.append(time.monotonic() - started)
                    if answer.status_code != 200:
                        refused.append(answer.text)

    with attack.under_way(), ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(report, range(SENDERS)))
    assert refused == []
    assert len(late) == NODES + NODES // AGAIN
    assert max(late) < patience_s(PATIENCE_S)
    assert running.peak_mib() < MEMORY_MIB
    answer = httpx2.get(running.url + "/v1/check", headers={"Authorization": "Bearer admin"})
    assert (answer.status_code, answer.json()["imbalance_gpu_us"]) == (200, 0)
