"""All three programs under attack by every role, with random kills: the books stay exact, and honest callers are
answered.

    python -m tests.attacks.siege --minutes 10 --seed 7

The programs are real, and only the hardware is simulated: an accountant, agents of three nodes, and a controller that
writes to objects of a file. Nodes with outboxes in this process measure how fast honest batches are answered, and an
administrator books adjustments. Meanwhile the attackers (`tests.attacks.attackers`) do what they can, and the programs
are killed with SIGKILL and started again. At the end a table says what was lost, who was refused, and how much memory
the accountant took. The exit status is 1 if a promise was broken.

Everything is on the loopback, and time and requests are bounded."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import msgspec
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

import fairshare
from gputally.base.clock import SystemClock
from gputally.server.tokens_and_grants import sha256
from tests.attacks.attackers import ROLES, SECRET, Target
from tests.chaos.accountant_process import GONE, AccountantProcess, Outbox, fork_server
from tests.chaos.killed_program import SCENARIOS, Program, agent_of
from tests.deadlines import patience_s, until
from tests.fakes.provider import provider
from tests.price_books import price_book_text
from tests.real.programs import free_ports

CLUSTER = "prod"
PROBES = 2
PROBE_MS, PROBED_MS = 10_000, 12 * 3_600_000
"""The span of a probe's intervals, and how far back they begin: as fresh as those of a node after an outage."""
EVIL_NODES = ("evil-0", "evil-1", "evil-2")
ISSUER = "https://oidc.edge"
HELD = {"whole": "GPU-whole-0", "sliced": "GPU-sliced-0", "mig": "GPU-mig-0"}
"""A GPU of each simulated node that pods hold all the time."""
ANSWER_S = 1.0
"""Within this time 99 of 100 honest batches are answered."""
MEMORY_MIB = 1_024
ENOUGH = 500
"""A percentile of fewer batches would be one batch."""
PROGRESS_S = 15.0
AROUND = 40
"""Lines of a log before and after a traceback that are shown with it: what the program did, and the rest of a traceback
of many lines."""
POLICY = """schema: 1
targets: {kai: {mode: weight, apply: enforce}}
bounds: {interval: 0}
queues: [{name: vision, team: vision, refs: ['kai:vision']}, {name: language, team: nlp, refs: ['kai:language']}]
"""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a siege is. kills: at most; each comes at a random moment."""

    seconds: float
    seed: int
    kills: int
    requests_per_second: float = 40.0


@dataclass
class Outcome:
    """What a siege showed."""

    kills: Counter[str] = field(default_factory=Counter)
    attackers: dict[str, Any] = field(default_factory=dict)
    answered_s: list[float] = field(default_factory=list)
    slowest: list[tuple[float, float]] = field(default_factory=list)
    """The batches that waited longest: for how long, and how long after the accountant's start they were sent."""
    honest: Counter[str] = field(default_factory=Counter)
    """Honest batches by status; `cut`: without an answer, because the accountant was killed."""
    rows: int = 0
    """Rows that the probes sent."""
    true_us: int = 0
    booked_us: int = 0
    lost: list[str] = field(default_factory=list)
    """What is not in the books as it should be."""
    acts: int = 0
    acts_lost: list[str] = field(default_factory=list)
    unready: list[str] = field(default_factory=list)
    """Answers of /readyz that were not 200 after the program had been ready."""
    to_ready_s: list[float] = field(default_factory=list)
    run_ns: int = 0
    waited_ns: int = 0
    """How long the accountant's threads ran, and how long they could have run, but the machine ran something else."""
    rss_mib: int = 0
    """Most memory of the accountant at one time, with its processes for documents."""
    ended_by_itself: list[str] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    """Tracebacks in the logs, with what is around them."""

    @property
    def p99_s(self) -> float:
        return sorted(self.answered_s)[len(self.answered_s) * 99 // 100] if self.answered_s else float("inf")

    @property
    def slowed(self) -> float:
        """Return how many times slower the accountant was because it had no processor of its own."""
        return 1 + self.waited_ns / self.run_ns if self.run_ns else 1.0

    def broken(self) -> list[str]:
        """Return the promises that were broken. Attackers and other work of this machine take processor time from the
        accountant, which they do not in a cluster: the time of an answer is measured by `slowed`."""
        roles = self.attackers.get("by_role", {})
        found = [f"lost: {each}" for each in (*self.lost, *self.acts_lost)]
        found += [f"ended by itself: {each}" for each in self.ended_by_itself]
        found += [f"not ready: {each}" for each in self.unready[:5]]
        found += [f"traceback: {each}" for each in self.defects[:5]]
        found += self.attackers.get("kept", ["the attackers did not report"])
        found += [f"{role} was not answered once" for role in self._idle(roles)]
        if len(self.answered_s) >= ENOUGH and self.p99_s > ANSWER_S * self.slowed:
            found.append(f"an honest batch waits {self.p99_s:.2f} s at the 99th percentile")
        if self.rss_mib > MEMORY_MIB:
            found.append(f"the accountant took {self.rss_mib} MiB")
        return found

    @staticmethod
    def _idle(roles: dict[str, dict[str, int]]) -> Iterator[str]:
        """Yield roles that did not attack, so that nothing was tried."""
        for kind in ROLES:
            counts = roles.get(kind.role, {})
            if not counts.get("refused", 0) + counts.get("answered", 0):
                yield kind.role

    def table(self) -> str:
        kinds = ("answered", "refused", "busy", "defect", "leak", "unanswered", "left", "not sent")
        lines = [f"{'role':8}{'requests':>10}" + "".join(f"{kind:>12}" for kind in kinds)]
        for role, counts in sorted(self.attackers.get("by_role", {}).items()):
            lines.append(f"{role:8}{sum(counts.values()):>10}" + "".join(f"{counts.get(k, 0):>12}" for k in kinds))
        lines += [
            f"kills            {self.kills.total()} {dict(self.kills)}",
            f"honest batches   {len(self.answered_s)} answered of {dict(self.honest)}",
            f"their p99        {self.p99_s * 1000:.0f} ms, the accountant {self.slowed:.1f} times slower than alone",
            "slowest          " + ", ".join(f"{s:.1f} s (sent {up:.1f} s after a start)" for s, up in self.slowest),
            f"GPU time         {self.true_us} us true, {self.booked_us} us booked; {self.rows} rows of probes",
            f"acts             {self.acts} confirmed, {len(self.acts_lost)} lost",
            f"readiness        {len(self.unready)} times false; starts take {max(self.to_ready_s, default=0):.1f} s",
            f"memory           {self.rss_mib} MiB",
        ]
        return "\n".join(lines)


class Siege:
    """Builds the programs, runs them under attack, and compares the books with the truth."""

    def __init__(
        self, folder: Path, size: Size, zygote: subprocess.Popen[str], people: str, say: Callable[[str], None]
    ):
        self.folder, self.size, self.say = folder, size, say
        self.chance = random.Random(size.seed)
        self.outcome = Outcome()
        self.over = threading.Event()
        names = ("accountant", "opencost", "kai", "controller", "pages")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.accountant = AccountantProcess(folder, self.ports["accountant"], zygote)
        self._write_settings(people)
        url = f"http://127.0.0.1:{self.ports['accountant']}"
        self.programs = {
            name: agent_of(folder, name, url, zygote, cluster=CLUSTER, token_file=str(folder / f"{name}.token"))
            for name in SCENARIOS
        }
        self.programs["fairshare"] = Program("fairshare", self._controller(url), folder, zygote)
        first_ms = time.time_ns() // 1_000_000 // PROBE_MS * PROBE_MS - PROBED_MS
        self.probes = [
            Outbox(
                f"probe-{n}", first_ms, epoch=f"0192-probe-{n}", cluster=CLUSTER, namespace=SECRET, token=f"probe-{n}",
                span_ms=PROBE_MS,
            )
            for n in range(PROBES)
        ]  # fmt: skip
        self.acts: list[str] = []
        self._life = 0
        """Odd while the accountant serves; a kill and a start each begin the next."""
        self._served = 0.0
        self._threads: dict[tuple[int, str], tuple[int, int]] = {}

    # --- settings --------------------------------------------------------------------------------

    def _write_settings(self, people: str) -> None:
        folder = self.folder
        nodes = (*SCENARIOS, *(f"probe-{n}" for n in range(PROBES)), *EVIL_NODES)
        rights = {
            "lead": {"scopes": ["read"], "teams": ["vision"]},
            "importer": {"scopes": ["import"], "cluster": CLUSTER},
            "admin": {"scopes": ["admin"]},
            "controller": {"scopes": ["read", "policy"]},
            **{node: {"scopes": ["ingest"], "cluster": CLUSTER, "node": node} for node in nodes},
        }
        tokens = [{"name": name, "token_sha256": sha256(name), **right} for name, right in rights.items()]
        for name in rights:
            (folder / f"{name}.token").write_text(name)
        key = rsa.generate_private_key(65537, 2048)
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / "edge.pem").write_bytes(text)
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
        (folder / "keys.json").write_text(json.dumps({"keys": [{**public, "kid": "k1", "use": "sig", "alg": "RS256"}]}))
        (folder / "secret").write_text("client-s3cret\n")
        keys = {"audience": "gputally", "jwks_file": str(folder / "keys.json")}
        login = {"client_id": "gputally", "client_secret_file": str(folder / "secret")}
        other = rsa.generate_private_key(65537, 2048).public_key()
        (folder / "people.json").write_text(
            json.dumps({"keys": [{**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(other)), "kid": "k1"}]})
        )
        callers = {
            "schema": 1,
            "issuers": [
                {"issuer": ISSUER, **keys, "cluster": "edge", "agents": ["gputally/agent"], "jobs": True},
                {"issuer": people, **keys, "jwks_file": str(folder / "people.json"), "user": "email", "login": login},
            ],
            "grants": [{"groups": ["platform"], "scopes": ["read", "admin"]}],
        }
        (folder / "tokens.yaml").write_text(yaml.safe_dump({"tokens": tokens}))
        (folder / "callers.yaml").write_text(yaml.safe_dump(callers))
        (folder / "prices.yaml").write_text(price_book_text(H100="2.5", A100="1.5"))
        (folder / "policy.yaml").write_text(POLICY)
        self.accountant.settings(
            auth="tokens", tokens=str(folder / "tokens.yaml"), callers=str(folder / "callers.yaml"), linger_ms=5,
            public_url=f"http://127.0.0.1:{self.ports['accountant']}", prices=str(folder / "prices.yaml"),
            opencost={"listen": f"127.0.0.1:{self.ports['opencost']}"}, checkpoint_seconds=5,
            kai_usage={"listen": f"127.0.0.1:{self.ports['kai']}"}, log_level="warning",
        )  # fmt: skip

    def _controller(self, url: str) -> list[str]:
        objects = Path(fairshare.__file__).parent / "samples" / "cluster.yaml"
        config = self.folder / "controller.yaml"
        settings = {
            "policy": str(self.folder / "policy.yaml"), "url": url, "objects": str(objects), "interval": 2,
            "token_file": str(self.folder / "controller.token"), "log_level": "warning",
            "listen": f"127.0.0.1:{self.ports['controller']}", "pages_listen": f"127.0.0.1:{self.ports['pages']}",
            "pages_tokens": str(self.folder / "tokens.yaml"),
        }  # fmt: skip
        config.write_text(yaml.safe_dump(settings))
        return ["fairshare", "run", "--config", str(config)]

    # --- the course ------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run everything, and return what it showed. Raises what a program's failure to start raises."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_all)
            self._serve()
            for program in self.programs.values():
                program.start(fork=True)
            until(self._agents_known, lambda: "the agents do not report:\n" + self._logs())
            until(self._teams_known, lambda: "the controller announces no policy:\n" + self._logs())
            begin_ms = (time.time_ns() // 1_000_000_000 + 1) * 1000
            attackers = stack.enter_context(self._attackers())
            jobs = (self._watch, self._weigh, self._act, *(lambda p=probe: self._probe(p) for probe in self.probes))
            threads = [threading.Thread(target=self._guarded, args=(job,), daemon=True) for job in jobs]
            for thread in threads:
                thread.start()
            try:
                self._kill_at_random()
            finally:
                self.over.set()
                for thread in threads:
                    thread.join()
            said, _ = attackers.communicate(timeout=patience_s(120))
            self.outcome.attackers = json.loads(said or "{}")
            self._compare(begin_ms)
        return self.outcome

    @contextlib.contextmanager
    def _attackers(self) -> Iterator[subprocess.Popen[str]]:
        target = Target(
            ports=self.ports, evil_nodes=EVIL_NODES, key=str(self.folder / "edge.pem"), issuer=ISSUER,
            foreign_gpus=(*HELD.values(), *(f"probe-{n}-0" for n in range(PROBES))), people="https://login.example",
            foreign_pods=tuple(f"probe-{n}-pod-0" for n in range(PROBES)), seed=self.size.seed,
            requests_per_second=self.size.requests_per_second,
            most_requests=int(self.size.requests_per_second * self.size.seconds * 4),
        )  # fmt: skip
        file = self.folder / "target.json"
        file.write_bytes(msgspec.json.encode(target))
        with (self.folder / "attackers.log").open("wb") as log, subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.attackers", str(file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # a failure of the siege itself must not look like a success
            self.outcome.lost.append(f"the siege failed: {error!r}")
            raise

    def _kill_at_random(self) -> None:
        began = told = time.monotonic()
        # As often the accountant as all others together: it is what the attackers reach.
        victims = [("accountant", *self.programs)[max(0, n % 8 - 3)] for n in range(self.size.kills)]
        self.chance.shuffle(victims)
        kills = list(zip(sorted(self.chance.uniform(0, self.size.seconds) for _ in victims), victims, strict=True))
        while (passed := time.monotonic() - began) < self.size.seconds or kills:  # a busy machine takes longer
            next_s = min(kills[0][0] if kills else self.size.seconds, told - began + PROGRESS_S)
            self.over.wait(max(0.0, next_s - passed))
            if time.monotonic() - told >= PROGRESS_S:
                told = time.monotonic()
                self.say(self._progress(told - began))
            if kills and time.monotonic() - began >= kills[0][0]:
                self._kill(kills.pop(0)[1])

    def _kill(self, name: str) -> None:
        if name == "accountant":
            if not self.accountant.alive():
                self.outcome.ended_by_itself.append(f"accountant:\n{self.accountant.words()}")
            self._life += 1
            self.accountant.end()
            self._serve()
        else:
            program = self.programs[name]
            if program.ended():
                self.outcome.ended_by_itself.append(f"{name}:\n{program.log.read_text(errors='replace')[-2000:]}")
            program.kill()
            program.start(fork=True)
        self.outcome.kills[name] += 1

    def _serve(self) -> None:
        began = time.monotonic()
        self.accountant.serve()
        self._life += 1
        self._served = time.monotonic()
        self.outcome.to_ready_s.append(time.monotonic() - began)

    def _progress(self, seconds: float) -> str:
        found = self.outcome
        return (
            f"{seconds:4.0f} s: {found.kills.total()} kills, {len(found.answered_s)} honest batches, p99 "
            f"{found.p99_s * 1000:.0f} ms, {len(self.acts)} acts, {found.rss_mib} MiB, not ready {len(found.unready)}"
        )

    # --- honest callers --------------------------------------------------------------------------

    def _probe(self, probe: Outbox) -> None:
        """Send a node's batches without a pause longer than a third of a second, and measure the answers."""
        timed = TimedAccountant(self.accountant, self.outcome, lambda: time.monotonic() - self._served)
        while not self.over.is_set():
            if probe.durable >= probe.last:
                probe.grow(1)
            try:
                probe.send(timed, 8)  # type: ignore[arg-type]
            except GONE:
                self.outcome.honest["cut"] += 1
            self.over.wait(0.3)

    def _act(self) -> None:
        """Book adjustments, each until it is confirmed."""
        while not self.over.wait(1.0):
            reason = f"act {len(self.acts)} of {self.size.seed}"
            body = {"month": "2026-01", "team": "vision", "amount": "-1.00", "reason": reason, "approved_by": "bo"}
            with contextlib.suppress(*GONE):
                status, answer = self.accountant.ask(
                    "POST", "/v1/adjustments", json.dumps(body).encode(), token="admin"
                )
                if status in (200, 409):  # 409: it was booked, and the kill cut the answer
                    self.acts.append(reason)
                elif status not in (429, 503):
                    self.outcome.lost.append(f"an act was answered with {status}: {answer}")

    def _watch(self) -> None:
        """Ask the accountant whether it is ready, while it serves."""
        while not self.over.wait(0.5):
            life, began = self._life, time.monotonic()
            try:
                status, answer = self.accountant.ask("GET", "/readyz", timeout=patience_s(5))
            except GONE as error:
                status, answer = 0, repr(error)
            if status != 200 and life == self._life and life % 2:
                self.outcome.unready.append(f"{status} after {time.monotonic() - began:.1f} s: {answer}")

    def _weigh(self) -> None:
        """Note the memory of the accountant and its processes, and how long its threads wait for a processor."""
        while not self.over.wait(0.5):
            pid = self.accountant.pid
            if pid is not None:
                self.outcome.rss_mib = max(self.outcome.rss_mib, memory_mib(pid))
                self._threads |= {(pid, thread): times for thread, times in processor_times(pid).items()}
        self.outcome.run_ns = sum(ran for ran, _ in self._threads.values())
        self.outcome.waited_ns = sum(waited for _, waited in self._threads.values())

    # --- the truth -------------------------------------------------------------------------------

    def _ask(self, path: str) -> Any:
        """Ask as an administrator. An accountant that was busy until now may refuse at first."""
        found: list[Any] = []

        def answered() -> bool:
            with contextlib.suppress(*GONE):
                status, answer = self.accountant.ask("GET", path, token="admin")
                assert status in (200, 429, 503), (path, answer)
                if status == 200:
                    found.append(answer)
            return bool(found)

        until(answered, lambda: f"{path} is not answered:\n{self._logs()}")
        return found[0]

    def _usage(self, start_ms: int, end_ms: int, by: str) -> dict[tuple[str, ...], dict[str, int]]:
        question = f"/v1/usage?by={by}&start={start_ms}&end={end_ms}&where.cluster={CLUSTER}"
        answer = self._ask(question)
        lines = list(answer["lines"])
        while answer["next_page"]:  # nodes that an import invents fill more than one page
            answer = self._ask(f"{question}&page={answer['next_page']}")
            lines += answer["lines"]
        return {
            tuple(line["key"].values()): line["accounts_gpu_us"] | {"energy_uj": line["energy_uj"]} for line in lines
        }

    def _agents_known(self) -> bool:
        now = time.time_ns() // 1_000_000
        found = self._usage(now - 600_000, now, "node,gpu")
        return all(allocated(found.get(held, {})) for held in HELD.items())

    def _teams_known(self) -> bool:
        """Whether a policy that names the teams is in force: an adjustment of an unknown team is refused."""
        with contextlib.suppress(*GONE):
            return self.accountant.ask("GET", "/v1/policy", token="admin")[0] == 200
        return False

    def _compare(self, begin_ms: int) -> None:
        outcome = self.outcome
        end_ms = (time.time_ns() // 1_000_000_000 + 2) * 1000

        def booked_to_the_end() -> bool:
            last = self._usage(end_ms - 1000, end_ms, "node,gpu")
            return all(allocated(last.get((node, gpu), {})) == 1_000_000 for node, gpu in HELD.items())

        until(booked_to_the_end, lambda: "the agents' last interval is not booked:\n" + self._logs(), 120)
        span_us = (end_ms - begin_ms) * 1000
        found = self._usage(begin_ms, end_ms, "node,gpu")
        for node, gpu in HELD.items():
            self._same(f"{node}/{gpu}", span_us, allocated(found.get((node, gpu), {})))
        self._nobody_elses(found, {gpu: node for node, gpu in HELD.items()})
        for probe in self.probes:
            probe.deliver(ProbeAccountant(self.accountant))  # type: ignore[arg-type]
            outcome.rows += probe.last
            lines = self._usage(probe.start_ms, probe.end_ms, "node,gpu")
            for gpu, (busy, held, energy) in probe.truth().items():
                accounts = lines.get((probe.node, gpu), {})
                self._same(f"{gpu} allocated", held, allocated(accounts))
                if (accounts.get("busy"), accounts.get("energy_uj")) != (busy, energy):
                    outcome.lost.append(f"{gpu}: busy and energy {accounts} instead of {busy}, {energy}")
            self._nobody_elses(lines, dict.fromkeys(probe.truth(), probe.node))
        check = self._ask(f"/v1/check?start={self.probes[0].start_ms}&end={end_ms}")
        if check["imbalance_gpu_us"]:
            outcome.lost.append(f"imbalance {check['imbalance_gpu_us']}")
        kept = {line["reason"] for line in self._ask("/v1/adjustments")}
        outcome.acts, outcome.acts_lost = len(self.acts), [act for act in self.acts if act not in kept]
        outcome.defects = [line for log in self.folder.glob("*.log") for line in tracebacks(log)]
        for name, program in self.programs.items():
            if program.ended():
                outcome.ended_by_itself.append(name)
        until(self._controller_ready, lambda: "the controller is not ready:\n" + self._logs())

    def _controller_ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.ports['controller']}/readyz", timeout=5) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def _nobody_elses(self, found: Collection[tuple[str, ...]], owners: Mapping[str, str]) -> None:
        """Note GPUs that count for another node in a span that their own node metered."""
        self.outcome.lost += [f"{gpu} is {node}'s too" for node, gpu in found if owners.get(gpu, node) != node]

    def _same(self, what: str, true_us: int, booked_us: int) -> None:
        self.outcome.true_us += true_us
        self.outcome.booked_us += booked_us
        if true_us != booked_us:
            self.outcome.lost.append(f"{what}: {true_us} us, booked {booked_us} us")

    def _logs(self) -> str:
        return "".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}\n" for log in self.folder.glob("*.log"))

    def _end_all(self) -> None:
        self.accountant.end()
        for program in self.programs.values():
            program.kill()


class ProbeAccountant:
    """The accountant as the outbox of a probe reaches it."""

    def __init__(self, to: AccountantProcess) -> None:
        self._to = to

    def ask(self, method: str, path: str, body: bytes | None = None, token: str = "") -> tuple[int, Any]:
        return self._to.ask(method, path, body, token=token)


class TimedAccountant(ProbeAccountant):
    """Notes how long each answer takes."""

    def __init__(self, to: AccountantProcess, outcome: Outcome, up_s: Callable[[], float]) -> None:
        super().__init__(to)
        self._outcome, self._up_s = outcome, up_s

    def ask(self, method: str, path: str, body: bytes | None = None, token: str = "") -> tuple[int, Any]:
        began, up_s = time.monotonic(), self._up_s()
        status, answer = super().ask(method, path, body, token)
        took_s = time.monotonic() - began
        self._outcome.answered_s.append(took_s)
        self._outcome.slowest = sorted([*self._outcome.slowest, (took_s, up_s)], reverse=True)[:5]
        self._outcome.honest[str(status)] += 1
        return status, answer


def allocated(accounts: dict[str, int]) -> int:
    return sum(accounts.get(name, 0) for name in ("busy", "allocated_idle", "allocated_unknown"))


def memory_mib(pid: int) -> int:
    """Return the resident memory of a process and its children; 0 if it has ended."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) // 1024
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += sum(memory_mib(int(child)) for child in (thread / "children").read_text().split())
    return total


def processor_times(pid: int) -> dict[str, tuple[int, int]]:
    """Return for each thread of a process how long it ran and how long it waited for a processor, in nanoseconds."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                ran, waited, _ = (thread / "schedstat").read_text().split()
                found[thread.name] = int(ran), int(waited)
    return found


def tracebacks(log: Path) -> list[str]:
    """Return each traceback in a log, whole and with the lines around it."""
    lines = log.read_text(errors="replace").splitlines()
    return [
        f"{log.name}:{at + 1}:\n" + "\n".join(lines[max(0, at - AROUND) : at + AROUND + 1]).replace("\\n", "\n")
        for at, line in enumerate(lines)
        if "Traceback (most recent call last):" in line
    ]


def besiege(folder: Path, size: Size, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run a siege in an empty folder."""
    with provider(SystemClock()) as people, fork_server() as zygote:
        people.hang.clear()
        try:
            return Siege(folder, size, zygote, people.url, say).run()
        finally:
            people.hang.set()


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m tests.attacks.siege", description=(__doc__ or "").split("\n\n")[0]
    )
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=os.getpid(), help="of the kills and the attacks")
    options.add_argument("--kills", type=int, default=200, help="at most")
    options.add_argument("--attacks", action="store_true", help="list the answers to each attack too")
    given = options.parse_args()
    size = Size(given.minutes * 60, given.seed, given.kills)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"a siege of {given.minutes:g} minutes, seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="siege-") as folder:
        outcome = besiege(Path(folder), size, lambda line: print(line, flush=True))
    print(outcome.table())
    for attack, counts in sorted(outcome.attackers.get("by_attack", {}).items()) if given.attacks else ():
        print(f"  {attack:28} {counts}")
    broken = outcome.broken()
    print("\n".join(["", *broken]) if broken else "nothing is lost, and all promises are kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
