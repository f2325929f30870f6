"""Attackers of every role against a running accountant and controller: a team lead, a node, an import, an issuer of
another cluster, and somebody without a token.

`python -m tests.attacks.attackers TARGET.json` attacks until its standard input closes, and writes what was answered as
one JSON document. The process has a low priority and a bounded number of requests, and it reaches only the loopback."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jwt
import msgspec
from fastapi.dependencies.utils import get_flat_params

from accountant.exports.protocol import exports
from agent.wire import Batch, Gap, Holder, Slice, UsageInterval
from tests.attacks.edges import edges_of, mutations
from tests.attacks.valid_requests import BODIES, READS, WRITES, address, sent
from tests.usage_records import batch, interval, pod_facts, pod_holder

HOST = "127.0.0.1"
MINUTE_MS = 60_000
SECRET = "siege-secret"
"""Part of every name of the team that no attacker may see."""
PATIENCE_S = 90.0
"""How long an attacker waits for an answer; the accountant refuses a waiting request after a minute."""
HALF_BATCH = "POST /v1/usage HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: 8000000\r\n\r\n"
RAW = (
    b"\0" * 1_000,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/usage HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nfffffffff\r\n",
    b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5_000 + b"\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + b"\1" * 500,
)
"""What is no HTTP, or hardly."""
FORM = "application/x-www-form-urlencoded"
FORMS = (
    ("accountant", "/sign-out"), ("accountant", "/node/prod/n/gpus"), ("pages", "/sign-out"),
    ("pages", "/shares/policy/apply"), ("pages", "/shares/policy/check"),
)  # fmt: skip
MOST_KEPT = 20
"""Defects and leaks of which the request is reported."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is attacked.

    ports: by program.
    evil_nodes: nodes whose tokens the attackers have.
    foreign_gpus, foreign_pods: of honest nodes.
    key: PEM file with the key of the issuer of the cluster `edge`.
    people: the issuer of people's tokens."""

    ports: Mapping[str, int]
    evil_nodes: tuple[str, ...]
    foreign_gpus: tuple[str, ...]
    foreign_pods: tuple[str, ...]
    key: str
    issuer: str
    people: str
    seed: int
    requests_per_second: float
    most_requests: int


@dataclass
class Tally:
    """What the attackers were answered. Thread-safe."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    by_attack: dict[str, Counter[str]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, role: str, attack: str, outcome: str, what: str = "") -> None:
        with self._lock:
            self.counts.setdefault(role, Counter())[outcome] += 1
            self.by_attack.setdefault(f"{role}: {attack}", Counter())[outcome] += 1
            if outcome in ("defect", "leak") and len(self.kept) < MOST_KEPT:
                self.kept.append(f"{outcome}: {role}: {attack}: {what}"[:1_000])

    @property
    def total(self) -> int:
        return sum(count.total() for count in self.counts.values())


class Attacker:
    """One thread of a role."""

    role = ""

    def __init__(self, target: Target, tally: Tally, number: int) -> None:
        self.target, self.tally = target, tally
        self.chance = random.Random(f"{target.seed} {self.role} {number}")
        self.attack = ""
        self.numbers = iter(range(number * 10_000_000 + int(time.time()) % 100_000, 1 << 60))

    def attacks(self) -> tuple[Callable[[], None], ...]:
        """Return the attacks of this role, of which each turn carries out one."""
        raise NotImplementedError

    def once(self) -> None:
        """Carry out one random attack. The accountant may be dead at any moment."""
        attack = self.chance.choice(self.attacks())
        self.attack = attack.__name__
        try:
            attack()
        except (OSError, http.client.HTTPException):
            self.tally.add(self.role, self.attack, "unanswered")

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        token: str = "",
        port: str = "accountant",
        *,
        forbidden: bool = False,
        **headers: str,
    ) -> tuple[int, bytes]:
        """Send one request and count its answer. forbidden: any success is a leak."""
        connection = http.client.HTTPConnection(HOST, self.target.ports[port], timeout=PATIENCE_S)
        try:
            given = {"Authorization": f"Bearer {token}"} if token else {}
            given |= {name.replace("_", "-"): value for name, value in headers.items()}
            try:
                connection.request(method, path, body, given)
            except (ValueError, UnicodeError):  # what http.client itself refuses to send
                self.tally.add(self.role, self.attack, "not sent")
                return 0, b""
            answer = connection.getresponse()
            status, content = answer.status, answer.read(64 << 20)
        finally:
            connection.close()
        self.tally.add(
            self.role,
            self.attack,
            "leak" if forbidden and status < 300 else outcome_of(status, content, port),
            f"{status} {method} {path[:200]} {body!r:.200} -> {content!r:.400}",
        )
        return status, content

    def leave(self, path: str, token: str = "", port: str = "accountant", after_s: float = 0.05) -> None:
        """Send a request and go before it is answered."""
        with socket.create_connection((HOST, self.target.ports[port]), timeout=10) as one:
            who = f"Authorization: Bearer {token}\r\n" if token else ""
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n{who}\r\n".encode())
            one.settimeout(after_s)
            with contextlib.suppress(TimeoutError):
                one.recv(1)
        self.tally.add(self.role, self.attack, "left")

    def trickle(self, head: str, port: str = "accountant", seconds: float = 8.0) -> None:
        """Send a body one byte at a time."""
        until = time.monotonic() + seconds
        with socket.create_connection((HOST, self.target.ports[port]), timeout=10) as one:
            one.sendall(head.encode())
            while time.monotonic() < until:
                try:
                    one.sendall(b"x")
                except OSError:
                    self.tally.add(self.role, self.attack, "refused")
                    return
                time.sleep(0.2)
        self.tally.add(self.role, self.attack, "left")

    def name(self, length: int = 240) -> str:
        """Return a name that was not used before."""
        return f"{next(self.numbers):016d}".ljust(length, "x")

    def edge_read(self, token: str) -> None:
        """Ask a random route with one or two of its parameters at an edge."""
        route = self.chance.choice(READS)
        names = [parameter.alias for parameter in get_flat_params(route.dependant)]
        wanted = self.chance.sample(names, min(len(names), self.chance.randint(0, 2)))
        path, query = address(route, {name: self.chance.choice(edges_of(name)) for name in wanted})
        self.ask("GET", path + (f"?{urlencode(query, errors='replace')}" if query else ""), token=token)

    def edge_write(self, token: str, only: str = "", *, forbidden: bool = False) -> None:
        """Send a random route a body with one value at an edge."""
        route = self.chance.choice([route for route in WRITES if not only or route.path == only])
        path, query = address(route, {})
        body = BODIES[route.path]
        changed = body if isinstance(body, str) else self.chance.choice(mutations(body))
        encoded = sent(changed)
        self.ask(
            min(route.methods or ()),
            f"{path}?{urlencode(query)}",
            encoded,
            token,
            forbidden=forbidden,
            Content_Type="application/json",
        )


def outcome_of(status: int, content: bytes, port: str) -> str:
    """Return the kind of an answer. The ports for KAI and OpenCost show all teams to whoever reaches them."""
    if SECRET.encode() in content and port not in ("kai", "opencost"):
        return "leak"
    if status in (429, 503) or b"problems/busy" in content:
        return "busy"
    if status >= 500 and not any(word in content for word in (b"no-price-book", b"cannot-render")):
        return "defect"
    return "answered" if status < 400 else "refused"


class Lead(Attacker):
    """The lead of the team `vision`, who may read this team's figures."""

    role = "lead"
    _job = quote("prod~vision~Job~train", safe="")

    def attacks(self) -> tuple[Callable[[], None], ...]:
        return (self.open_span, self.documents, self.documents_left, self.edges, self.writes, self.other_teams,
                self.last_day, self.last_day, self.heavy, self.heavy_left, self.unique_questions)  # fmt: skip

    def _ask(self, path: str) -> tuple[int, bytes]:
        return self.ask("GET", path, token="lead")

    def open_span(self) -> None:
        end = self.chance.choice(
            ("end=9999-12-31", "start=0001-01-01", "start=1970-01-01&end=9999-12-31", "size=36500d")
        )
        self._ask(self.chance.choice(self._spans()) + end)

    def last_day(self) -> None:
        """Ask for the figures of the time in which other teams hold GPUs, by the names that would tell theirs."""
        now = int(time.time() * 1000)
        path = self.chance.choice(("/v1/usage?by=namespace&", "/v1/cost?by=namespace,pod&", "/v1/jobs?"))
        self._ask(f"{path}start={now - 86_400_000}&end={now}")

    def _spans(self) -> tuple[str, ...]:
        return (f"/v1/jobs/{self._job}?", "/v1/jobs?", "/v1/usage?by=namespace,pod&",
                "/v1/cost?by=namespace,user&", "/v1/waits?", "/v1/windows?", "/jobs?")  # fmt: skip

    def _document(self) -> str:
        form = self.chance.choice(("pdf", *exports()))
        month = f"month=2026-{self.chance.choice(('01', '10', '11'))}&team=vision"
        return self.chance.choice((f"/v1/report?{month}&format={form}", f"/v1/statement?{month}"))

    def documents(self) -> None:
        self._ask(self._document())

    def documents_left(self) -> None:
        for _ in range(4):
            self.leave(self._document(), "lead", after_s=self.chance.uniform(0, 1))

    def edges(self) -> None:
        self.edge_read("lead")

    def writes(self) -> None:
        self.edge_write("lead", forbidden=True)

    def other_teams(self) -> None:
        team = self.chance.choice(("nlp", "speech", "", "vision,nlp", "*", "%"))
        where = urlencode({self.chance.choice(("where.team", "team", "where.namespace", "where.node")): team})
        self._ask(
            self.chance.choice(
                ("/v1/usage?by=namespace&", "/v1/cost?by=team,namespace&", "/v1/jobs?", "/v1/statement?", "/jobs?")
            )
            + where
        )

    def _heavy(self) -> str:
        by = ",".join(self.chance.sample(("team", "job", "pod", "container", "user", "gpu", "node", "gpu_model"), 3))
        return self.chance.choice(("/v1/usage", "/v1/cost")) + f"?by={by}&start=2026-01-01&end=2026-11-27"

    def heavy(self) -> None:
        self._ask(self._heavy())

    def heavy_left(self) -> None:
        for _ in range(8):
            self.leave(self._heavy(), "lead", after_s=self.chance.uniform(0, 0.3))

    def unique_questions(self) -> None:
        self._ask(f"/v1/usage?by=pod&start=2026-11-01&end=2026-11-27&where.pod={self.name(250)}")


class Node(Attacker):
    """A node's agent, with a token for this node alone."""

    role = "node"

    def attacks(self) -> tuple[Callable[[], None], ...]:
        return (self.names, self.gpus, self.old_hours, self.parts, self.gaps, self.foreign_gpus, self.foreign_holders,
                self.clocks,
                self.numbers_of_an_outbox, self.bombs, self.slow, self.edges, self.other_nodes, self.reads, self.facts,
                self.changed_again, self.left_halfway)  # fmt: skip

    def __init__(self, target: Target, tally: Tally, number: int) -> None:
        super().__init__(target, tally, number)
        self.node = target.evil_nodes[number % len(target.evil_nodes)]
        self.token = self.node
        self.cluster = "prod"
        self._epoch = ""
        self._seq = 1

    @property
    def _now(self) -> int:
        return int(time.time() * 1000) // MINUTE_MS * MINUTE_MS - 10 * MINUTE_MS

    def send(self, rows: Any = (), facts: Any = (), **changes: Any) -> int:
        """Send a batch of the outbox, and begin another one if it is refused."""
        if not self._epoch or self.chance.random() < 0.02:
            self._epoch, self._seq = f"01930000-0000-7000-8000-{next(self.numbers):012d}"[:36], 1
        made = batch(rows, facts, cluster=self.cluster, node=self.node, epoch=self._epoch, first_seq=self._seq)
        made = msgspec.structs.replace(made, **changes)
        status, _ = self._post(made)
        if status == 200 and "first_seq" not in changes:
            self._seq += len(tuple(rows)) + len(tuple(facts))
        elif status:
            self._epoch = ""
        return status

    def _post(self, made: Batch, *, forbidden: bool = False) -> tuple[int, bytes]:
        content = gzip.compress(msgspec.json.encode(made), 1)
        return self.ask("POST", "/v1/usage", content, self.token, forbidden=forbidden, Content_Encoding="gzip")

    def _row(self, gpu: str, holder: Holder | None, **more: Any) -> UsageInterval:
        return interval(self._now + self.chance.randint(0, 5 * MINUTE_MS), gpu, holder, span_ms=1, busy_us=500, **more)

    def _many(self) -> int:
        return self.chance.choice((1, 10, 100, 2_000))

    def names(self) -> None:
        self.send([self._row(f"GPU-{self.node}", pod_holder(self.name(), "vision")) for _ in range(self._many())])

    def old_hours(self) -> None:
        """Rows of hours of the past year, which the ledger keeps as sums of hours."""
        rows = []
        for _ in range(self._many()):
            begin = self._now - self.chance.randint(1, 9_000) * 60 * MINUTE_MS + self.chance.randint(0, MINUTE_MS)
            rows.append(interval(begin, f"GPU-{self.node}", pod_holder("old", "vision"), span_ms=1, busy_us=1))
        self.send(rows)

    def gpus(self) -> None:
        self.send([self._row(f"GPU-{self.name(40)}", None) for _ in range(self._many())])

    def parts(self) -> None:
        rows = []
        for _ in range(self._many()):
            number = next(self.numbers) % 2**31
            rows.append(
                self._row(
                    f"GPU-{self.node}", pod_holder("one", "vision"), slice=Slice(f"{number}g", number, 0, 1, 7, 1, 7)
                )
            )
        self.send(rows)

    def gaps(self) -> None:
        gaps = tuple(Gap(self._now, self._now + 1, "y" * 4_000) for _ in range(200))
        self.send([self._row(f"GPU-{self.node}", None, gaps=gaps) for _ in range(5)])

    def foreign_gpus(self) -> None:
        self.send([self._row(gpu, pod_holder(self.name(60), "vision")) for gpu in self.target.foreign_gpus])

    def foreign_holders(self) -> None:
        holders = [Holder(kind="slurm", uid=str(self.chance.randint(1, 9_999)), name="job"),
                   Holder(kind="process", uid="probe-0/1/2", name="python"),
                   *(Holder(kind="pod", uid=uid, namespace="vision") for uid in self.target.foreign_pods)]  # fmt: skip
        self.send([self._row(f"GPU-{self.node}", self.chance.choice(holders))])

    def facts(self) -> None:
        uid = self.chance.choice((*self.target.foreign_pods, self.name(36)))
        now = self._now + self.chance.choice((0, -(10**12), 10**9, 10**12))
        labels = {"team": "vision", **{self.name(60): "v" * 4_000 for _ in range(self.chance.choice((0, 250)))}}
        self.send(
            (), [pod_facts("p", now, namespace="vision", node="probe-0", uid=uid, labels=labels, workload="Job/train")]
        )

    def clocks(self) -> None:
        now = int(time.time() * 1000)
        self.send((), sent_ms=now + self.chance.choice((3_600_000, -3_600_000, 10**12, -(10**12), 2**62, -(2**63), 0)))
        ahead = self.chance.choice((3_600_000, 10**10, 2**52))
        self.send([interval(now + ahead, f"GPU-{self.node}", None, span_ms=MINUTE_MS)])

    def numbers_of_an_outbox(self) -> None:
        edge = self.chance.choice((2, 10**6, 2**31, 2**53, 2**63 - 1, -1, 0))
        self.send([self._row(f"GPU-{self.node}", None)], first_seq=edge, oldest_seq=self.chance.choice((1, edge)))

    def changed_again(self) -> None:
        """The same numbers with other content."""
        before = self._seq
        self.send([self._row(f"GPU-{self.node}", None)])
        self._seq = min(before, self._seq)
        self.send([self._row(f"GPU-{self.node}", pod_holder("other", "vision"))])

    def bombs(self) -> None:
        raw = self.chance.choice((b'{"cluster": "' + b"x" * 58_000_000 + b'"}', b"[" * 1_000_000, b'{"a":' * 100_000))
        self.ask("POST", "/v1/usage", gzip.compress(raw, 9), self.token, Content_Encoding="gzip")

    def slow(self) -> None:
        self.trickle(HALF_BATCH.format(self.token))

    def left_halfway(self) -> None:
        """Declare a large body, send half of it, and go."""
        for _ in range(5):
            with socket.create_connection((HOST, self.target.ports["accountant"]), timeout=10) as one:
                one.sendall(HALF_BATCH.format(self.token).encode() + b"[" * 1_000_000)
            self.tally.add(self.role, self.attack, "left")

    def edges(self) -> None:
        body = {**BODIES["/v1/usage"], "cluster": self.cluster, "node": self.node}
        epoch = f"01930000-0000-7000-8000-{next(self.numbers):012d}"[:36]
        for changed in self.chance.sample(mutations(body), 5):
            one = (
                {**changed, "epoch": epoch}
                if isinstance(changed, dict) and changed.get("epoch") == body["epoch"]
                else changed
            )
            self.ask("POST", "/v1/usage", sent(one), self.token)

    def other_nodes(self) -> None:
        made = batch(
            [self._row("GPU-x", None)], cluster=self.chance.choice(("prod", "edge")), node="probe-0", epoch="e"
        )
        self._post(made, forbidden=True)

    def reads(self) -> None:
        self.edge_read(self.token)


class Import(Attacker):
    """Somebody who may import the past of the cluster."""

    role = "import"

    def attacks(self) -> tuple[Callable[[], None], ...]:
        return self.empty, self.agents_gpus, self.overlaps, self.edges, self.chunks, self.names, self.wrong_place

    def _send(self, rows: Any, node: str, **changes: Any) -> None:
        epoch = f"import:{self.chance.choice(('slurm', 'prometheus'))}:{next(self.numbers):014d}"
        made = msgspec.structs.replace(batch(rows, cluster="prod", node=node, epoch=epoch), **changes)
        self.ask("POST", "/v1/imports/usage", msgspec.json.encode(made), "importer")

    def _rows(self, gpu: str, count: int, name: Callable[[], str]) -> list[UsageInterval]:
        begin = (
            int(time.time() * 1000) // MINUTE_MS * MINUTE_MS - self.chance.choice((60, 700, 1_440, 400_000)) * MINUTE_MS
        )
        return [
            interval(begin + at * MINUTE_MS, gpu, pod_holder(name(), "vision"), span_ms=MINUTE_MS, method="imported")
            for at in range(count)
        ]

    def empty(self) -> None:
        for _ in range(10):
            self._send((), self.name(50), sent_ms=int(time.time() * 1000) + 3_600_000)

    def agents_gpus(self) -> None:
        gpu = self.chance.choice(self.target.foreign_gpus)
        self._send(self._rows(gpu, 60, lambda: "imported"), self.chance.choice(("probe-0", self.name(30))))

    def overlaps(self) -> None:
        self._send(self._rows("GPU-imported", 500, lambda: "imported"), "imported-node")

    def names(self) -> None:
        self._send(self._rows(f"GPU-{self.name(40)}", 500, self.name), self.name(40))

    def chunks(self) -> None:
        self.edge_write("importer", "/v1/imports")

    def edges(self) -> None:
        self.edge_write("importer", "/v1/imports/usage")

    def wrong_place(self) -> None:
        self.edge_write("importer")


class Issuer(Node):
    """The issuer of the cluster `edge`, who can sign any token of this cluster."""

    role = "issuer"

    def __init__(self, target: Target, tally: Tally, number: int) -> None:
        super().__init__(target, tally, number)
        self._key = Path(target.key).read_bytes()
        self.cluster = "edge"

    def attacks(self) -> tuple[Callable[[], None], ...]:
        return self.forged, self.invented_nodes, self.people, self.honest_nodes, self.progress, self.large

    def _claims(self, **more: Any) -> dict[str, Any]:
        now = int(time.time())
        bound = {"kubernetes.io": {"node": {"name": self.node}, "pod": {"uid": "u", "name": "p"}}}
        return {"iss": self.target.issuer, "aud": "gputally", "iat": now, "exp": now + 300,
                "sub": "system:serviceaccount:gputally:agent", **bound, **more}  # fmt: skip

    def _signed(self, **more: Any) -> str:
        return jwt.encode(self._claims(**more), self._key, algorithm="RS256", headers={"kid": "k1"})

    def invented_nodes(self) -> None:
        """A node that never was, with as much as a node may leave."""
        self.node = self.name(40)
        self.token = self._signed()
        self._epoch = ""
        self.send([self._row(f"GPU-{self.name(40)}", pod_holder(self.name(), "vision")) for _ in range(100)])

    def honest_nodes(self) -> None:
        """A true token of another cluster names a node of this one."""
        token = self._signed(**{"kubernetes.io": {"node": {"name": "probe-0"}}})
        made = batch([self._row(self.target.foreign_gpus[0], None)], cluster="prod", node="probe-0", epoch="e")
        self.ask("POST", "/v1/usage", msgspec.json.encode(made), token, forbidden=True)

    def forged(self) -> None:
        claims, ahead = self._claims(), int(time.time()) + 10**6
        changes: tuple[dict[str, Any], ...] = (
            {"exp": 0}, {"exp": "x"}, {"exp": 2**80}, {"exp": None}, {"nbf": ahead}, {"iat": ahead},
            {"aud": ["a"] * 1_000}, {"iss": "https://other"}, {"iss": self.target.people}, {"sub": "admin"},
            {"sub": ["a"]}, {"kubernetes.io": []},
            {"kubernetes.io": {"node": {"name": "x" * 10_000}}}, {"kubernetes.io": {"node": {"name": "a\u202eb\n"}}},
            {"scopes": ["admin"], "scope": "admin", "groups": ["platform"]},
        )  # fmt: skip
        token = jwt.encode(
            claims | self.chance.choice(changes),
            self._key,
            algorithm="RS256",
            headers={"kid": self.chance.choice(("k1", "", "../k", "k" * 5_000))},
        )
        head = base64.urlsafe_b64encode(json.dumps({"alg": "none", "kid": "k1"}).encode()).decode().rstrip("=")
        hmac = jwt.encode(claims, b"0" * 64, algorithm="HS256", headers={"kid": "k1"})
        parts = token.split(".")
        cut = self.chance.choice(
            (
                token,
                f"{head}.{parts[1]}.",
                hmac,
                token[:-4],
                ".".join((parts[0], parts[1], "")),
                "e30.e30.e30",
                token * 2,
            )
        )
        path = self.chance.choice(("/v1/usage?by=pod", "/v1/audit", "/v1/policy", "/", "/v1/jobs"))
        self.ask("GET", path, token=cut)

    def people(self) -> None:
        """Names a person with an administrator's group."""
        token = self._signed(
            email="admin@example.com",
            email_verified=True,
            groups=["platform"] * self.chance.choice((1, 300)),
            iss=self.chance.choice((self.target.issuer, self.target.people)),
        )
        self.ask(self.chance.choice(("GET", "PUT")), "/v1/policy", token=token, forbidden=True)

    def progress(self) -> None:
        token = self._signed(
            sub="system:serviceaccount:ml:job",
            **{"kubernetes.io": {"pod": {"uid": self.chance.choice(self.target.foreign_pods)}}},
        )
        self.ask(
            "POST", "/v1/jobs/prod~vision~Job~train/progress", b'[{"epoch": 1}]', token, Content_Type="application/json"
        )

    def large(self) -> None:
        self.ask(
            "GET", "/v1/jobs", token=self._signed(groups=[self.name(200) for _ in range(self.chance.choice((20, 200)))])
        )


class Nobody(Attacker):
    """Somebody without a token who reaches every port."""

    role = "none"

    def attacks(self) -> tuple[Callable[[], None], ...]:
        return (self.sign_in, self.forms, self.slow_forms, self.half_open, self.edges, self.writes, self.raw,
                self.open_documents, self.tokens, self.cookies, self.cost_windows, self.cost_windows_left, self.shares,
                self.pages)  # fmt: skip

    def sign_in(self) -> None:
        path = self.chance.choice(
            ("/sign-in", "/sign-in?next=/", "/sign-in/go?provider=0", "/sign-in/done?code=a&state=b")
        )
        self.leave(
            path + ("&" if "?" in path else "?") + urlencode({"next": self.name(100)}),
            after_s=self.chance.uniform(0, 5),
        )

    def forms(self) -> None:
        port, path = self.chance.choice(FORMS)
        body = b"a=" + b"x" * self.chance.choice((10, 100_000, 2_000_000)) + b"&b=" * 1_000
        self.ask("POST", path, body, port=port, Content_Type=FORM)

    def slow_forms(self) -> None:
        port, path = self.chance.choice((*FORMS, ("accountant", "/v1/usage"), ("opencost", "/x")))
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {FORM}\r\nContent-Length: 100000\r\n\r\n"
        self.trickle(head, port)

    def half_open(self) -> None:
        port = self.chance.choice(tuple(self.target.ports))
        with contextlib.ExitStack() as kept:
            for number in range(100):
                one = kept.enter_context(socket.create_connection((HOST, self.target.ports[port]), timeout=10))
                if number % 2:
                    one.sendall(b"GET / HTTP/1.1\r\nX: ")
            time.sleep(2)
        self.tally.add(self.role, self.attack, "left")

    def raw(self) -> None:
        port = self.chance.choice(tuple(self.target.ports))
        with socket.create_connection((HOST, self.target.ports[port]), timeout=10) as one:
            one.settimeout(10)
            one.sendall(self.chance.choice(RAW))
            with contextlib.suppress(TimeoutError):
                answer = one.recv(64)
                defect = answer[9:12] == b"500"
                self.tally.add(self.role, self.attack, "defect" if defect else "refused", repr(answer))
                return
        self.tally.add(self.role, self.attack, "left")

    def open_documents(self) -> None:
        for path in ("/openapi.json", "/metrics", "/", "/docs", "/readyz", "/livez"):
            self.ask("GET", path)

    def edges(self) -> None:
        self.edge_read("")

    def writes(self) -> None:
        self.edge_write("", forbidden=True)

    def tokens(self) -> None:
        self.ask("GET", "/v1/usage", token=self.chance.choice((self.name(60), "a.b.c", "x" * 20_000, "é", "\t")))

    def cookies(self) -> None:
        names = ("gputally-session", "__Host-gputally", "gputally", "__Host-gputally-8443")
        value = f"{self.chance.choice(names)}={self.name(self.chance.choice((20, 4_000)))}"
        self.ask("GET", "/", port=self.chance.choice(("accountant", "pages")), Cookie=value, Accept="text/html")

    def _cost(self) -> str:
        window = self.chance.choice(
            ("1d", "30d", "36500d", "2026-01-01T00:00:00Z,9999-12-31T00:00:00Z", "month", "-1d", "0", "9" * 400)
        )
        path = self.chance.choice(("/allocation", "/allocation/compute", "/allocation/summary", "/assets"))
        return (
            path
            + "?"
            + urlencode(
                {"window": window, "aggregate": self.chance.choice(("pod", "namespace", self.name(100))), "step": "1h"}
            )
        )

    def cost_windows(self) -> None:
        self.ask("GET", self._cost(), port="opencost")

    def cost_windows_left(self) -> None:
        for _ in range(8):
            self.leave(self._cost(), port="opencost", after_s=self.chance.uniform(0, 0.3))

    def shares(self) -> None:
        size = self.chance.choice(("1m", "7d", "36500d", "0s", "9" * 30 + "d"))
        query = f"sum_over_time((kai_queue_allocated_gpus)[{size}:1m])"
        at = self.chance.choice(("", "0", "-1", "1e300", "nan", "253402300800"))
        self.ask("GET", "/api/v1/query?" + urlencode({"query": query, "time": at}), port="kai")

    def pages(self) -> None:
        path = self.chance.choice(
            (
                "/",
                "/shares/queue/vision",
                "/shares/shares.csv?sort=shares.queue",
                "/shares/decisions",
                "/shares/policy",
                "/shares/preview/x",
                "/shares/decision?at=9999",
            )
        )
        self.ask(self.chance.choice(("GET", "POST", "PUT")), path, port="pages", Accept="text/html")


ROLES: Mapping[type[Attacker], int] = {Lead: 3, Node: 3, Import: 1, Issuer: 2, Nobody: 4}
"""Threads of each role."""


def attack(target: Target, over: threading.Event) -> Tally:
    """Attack with all roles until `over` is set or the requests are used up."""
    tally = Tally()

    def work(attacker: Attacker) -> None:
        pace = target.requests_per_second / sum(ROLES.values())
        while not over.wait(attacker.chance.expovariate(pace)) and tally.total < target.most_requests:
            attacker.once()

    threads = [
        threading.Thread(target=work, args=(kind(target, tally, number),), name=f"{kind.role} {number}")
        for kind, count in ROLES.items()
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def main() -> None:
    os.nice(10)
    target = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Target)
    over = threading.Event()

    def end_with_input() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=end_with_input, daemon=True).start()
    tally = attack(target, over)
    print(json.dumps({"by_role": tally.counts, "by_attack": tally.by_attack, "kept": tally.kept}), flush=True)


if __name__ == "__main__":
    main()
