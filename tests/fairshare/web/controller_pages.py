"""The controller's pages within this process, over a controller that has run for a while and an accountant with its
data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import unescape
from math import sin
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
from starlette.testclient import TestClient

from accountant.wire.policy_models import Decision, Policy, PolicyVersion
from accountant.wire.usage_cost_and_job_models import Accounts, Dimension, UsageLine
from fairshare.controller import policy_file as policies
from fairshare.controller.control_loop import ALONE, Controller
from fairshare.controller.policy_file import PolicyFileWriter, PolicyLocation
from fairshare.core.queues_and_weights import Pod
from fairshare.explain import what_if_simulation
from fairshare.explain.what_if_simulation import Comparison, ReplayedQueue
from fairshare.web.page_authentication import PageAuthentication
from fairshare.web.page_routing import PageContext, PagesApp
from fairshare.web.policy_pages import ROUTES
from fairshare.web.queue_history import QueueHistory, ReportCache
from fairshare.web.what_if_worker import Preview, PreviewOrder, Previews, ProgressCallback
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantUnavailable
from gputally.base.units import MS_PER_HOUR, US_PER_HOUR
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.server.sign_in import FORM_TOKEN, SignInService
from gputally.server.tokens_and_grants import TokenFile, new_token
from tests.deadlines import CALM_S, until
from tests.fairshare import samples
from tests.fairshare.conftest import NOW_MS, Accountant
from tests.fairshare.scheduler_kinds import KINDS

USED = {"research": 0.52, "vision": 0.33, "language": 0.19, "robotics": 0.05, "serving": 0.2, "students": 0.13}
"""Parts of the window's capacity; a queue's contain its children's."""
LEAVES = ("vision", "language", "robotics", "serving", "students")


def settled(previews: Previews, key: str, calm_s: float = CALM_S) -> Preview:
    """Wait for the preview's end and return it."""

    def over() -> Preview | None:
        found = previews.get(key)
        return None if found is None or found.state == "running" else found

    found: Preview = until(over, "the preview does not end", calm_s)
    return found


class Books:
    """Answers of an accountant, computed from the fake that the controller uses."""

    def __init__(self, accountant: Accountant) -> None:
        self._accountant = accountant
        self.asked = 0

    def usage(
        self,
        start_ms: int,
        end_ms: int,
        by: Sequence[Dimension],
        where: Mapping[Dimension, Sequence[str]] | None = None,
    ) -> Iterator[UsageLine]:
        self._answer()
        assert tuple(by) == ("hour",)
        asked = (where or {}).get("queue", LEAVES)
        for n, at in enumerate(range(start_ms, end_ms, MS_PER_HOUR)):
            of = [64 * USED[queue] * (1 + 0.6 * sin(n / 9 + q)) for q, queue in enumerate(LEAVES) if queue in asked]
            if of:
                yield usage_line(at, round(sum(max(0.0, gpus) for gpus in of) * US_PER_HOUR))

    def decisions(self, start_ms: int, end_ms: int, *, subject: str = "", per_get: int = 1_000) -> Iterator[Decision]:
        self._answer()
        found = [each for each in self._accountant.decisions if start_ms <= each.at_ms < end_ms]
        yield from sorted(
            (each for each in found if subject in ("", each.subject)), key=lambda each: each.at_ms, reverse=True
        )

    def policies(self) -> list[PolicyVersion]:
        self._answer()
        return [
            PolicyVersion(version=each.version(), effective_ms=0, policy=each) for each in self._accountant.policies
        ]

    def _answer(self) -> None:
        self.asked += 1
        if self._accountant.down:
            raise AccountantUnavailable("http://accountant:8080: connection refused")


def usage_line(at_ms: int, gpu_us: int) -> UsageLine:
    """Build one hour of usage."""
    hour = datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H")
    zero = dict.fromkeys(Accounts.model_fields, 0)
    accounts = Accounts(**{**zero, "busy": gpu_us})
    return UsageLine.model_construct(key={"hour": hour}, accounts_gpu_us=accounts)


def quick(order: PreviewOrder, told: ProgressCallback, stop: threading.Event) -> Comparison:
    """A comparison with made-up figures instead of a replay."""
    told(0.5, "replaying the draft")
    names = what_if_simulation.leaf_names(order.then)
    rows, series = [], {}
    days = [float(day) for day in range(1, order.days + 1)]
    for q, name in enumerate(names):
        had = 300.0 * (q + 1)
        now = ReplayedQueue(name, had, 90, 1.5, 1.0, 12)
        then = ReplayedQueue(name, had + (40.0 if q % 2 else -60.0), 90, 1.1, 0.8, 9)
        rows.append(what_if_simulation.ComparedQueue(name, had + 7, now, then))
        cases = enumerate(("had", "now", "then"))
        series[name] = {case: [(day, 6 + 3 * sin(day + q + shift)) for day in days] for shift, case in cases}
    start = order.at_ms - order.days * 24 * MS_PER_HOUR
    return Comparison(64, 1234, start, order.at_ms, tuple(rows), series, ("jobs are as long as they were",))


@dataclass(frozen=True)
class Answer:
    """A response. cookies: as in `Set-Cookie`."""

    status: int
    body: bytes
    headers: httpx2.Headers

    @property
    def cookies(self) -> tuple[str, ...]:
        return tuple(self.headers.get_list("set-cookie"))

    @property
    def type(self) -> str:
        return str(self.headers["Content-Type"])


def ask(site: PagesApp, method: str, url: str, form: Mapping[str, str] | None, headers: Mapping[str, str]) -> Answer:
    """Send one request to the pages within this process, without stored cookies."""
    asking = TestClient(site.observed(), raise_server_exceptions=False, follow_redirects=False)
    found = asking.request(method, url, data=form, headers={"accept": "", **headers})
    return Answer(found.status_code, found.content, found.headers)


@dataclass
class Stage:
    """The pages and everything they read. tokens: by scope; "" is a request without a token."""

    site: PagesApp
    scene: ReportCache
    accountant: Accountant
    books: Books
    clock: VirtualClock
    controller: Controller
    cluster: MemoryCluster
    place: PolicyLocation
    file: Path
    previews: Previews
    tokens: dict[str, str] = field(default_factory=dict)
    applied: list[tuple[str, Policy | None, Policy, str]] = field(default_factory=list)

    def get(self, url: str, scope: str = "", **headers: str) -> Answer:
        return ask(self.site, "GET", url, None, self._headers(scope, headers))

    def post(
        self, url: str, form: Mapping[str, str], scope: str = "", mark: str | None = None, **headers: str
    ) -> Answer:
        """Send a form. mark: its token against forgery; None takes the right one for this caller."""
        right = mark if mark is not None else self.mark(scope)
        return ask(self.site, "POST", url, {FORM_TOKEN: right, **form}, self._headers(scope, headers))

    def mark(self, scope: str = "") -> str:
        """Return the token against forgery in a form for this scope."""
        text = self.get("/shares/policy", scope).body.decode()
        _, found, rest = text.partition(f'name="{FORM_TOKEN}" value="')
        return rest.partition('"')[0] if found else ""

    def _headers(self, scope: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        sent = {"host": "localhost:9404", **{key.replace("_", "-"): value for key, value in headers.items()}}
        if scope in self.tokens:
            sent["authorization"] = f"Bearer {self.tokens[scope]}"
        return sent


def published_sample() -> str:
    """Return the sample policy with weights that are published, and at every cycle."""
    text = samples.policy_text()
    return text.replace("    mode: usage\n", "    mode: weight\n").replace("interval: 3h", "interval: 0s")


def stage(
    folder: Path,
    *,
    text: str | None = None,
    writable: bool = False,
    guarded: bool = False,
    cycles: int = 3,
    leading: bool = True,
    pods: Sequence[Pod] = (),
    work: Any = quick,
    people: Callable[[VirtualClock], Callable[[], SignInService | None]] | None = None,
    token_file: Path | None = None,
    accountant_pages: str = "http://accountant/",
) -> Stage:
    """Build the pages. text: the policy file (None: `published_sample`). guarded: requests need a token.
    people: the sign-in, on the stage's clock. token_file: the file of tokens (None: one of the stage, if `guarded`)."""
    file = folder / "policy.yaml"
    given = text if text is not None else published_sample()
    file.write_text(given)
    clock = VirtualClock(NOW_MS)
    accountant = Accountant()
    accountant.capacity = 64 * 64 * US_PER_HOUR  # 64 GPUs; the window's half-life leaves some 64 hours of its week
    accountant.spend(**USED)
    scene = ReportCache()
    cluster = MemoryCluster(KINDS, samples.cluster_objects())
    policy: Policy = policies.load(file)[0]
    controller = Controller(
        policy, accountant, cluster, clock, observe=lambda report: scene.observe(report, policy), pods=lambda: pods,
        term=lambda: ALONE if leading else None,
    )  # fmt: skip
    for _ in range(cycles):
        controller.cycle()
        clock.advance(600_000)
    tokens: dict[str, str] = {}
    listed: TokenFile | None = None
    if guarded:
        node: dict[str, Any] = {"cluster": "prod", "node": "node-1"}
        scopes = ("read", "policy", "ingest", "progress", "admin")
        made = {scope: new_token(scope, (scope,), **node) for scope in scopes}
        made["team"] = new_token("lead", ("read",), teams=("vision",))
        made["both"] = new_token("both", ("read", "policy"))
        tokens = {name: token for name, (token, _) in made.items()}
        file_of_tokens = folder / "tokens.yaml"
        file_of_tokens.write_text("tokens:\n" + "".join(entry for _, entry in made.values()))
        listed = TokenFile(file_of_tokens, clock, lambda fault: None)
    if token_file is not None:
        listed = TokenFile(token_file, clock, lambda fault: None)
    books = Books(accountant)
    previews = Previews(work)
    place = PolicyLocation(file, PolicyFileWriter(file) if writable else None)
    applied: list[tuple[str, Policy | None, Policy, str]] = []
    context = PageContext(
        scene, QueueHistory(books, clock), previews, place, clock, 600.0, lambda *said: applied.append(said),
        accountant_pages,
    )  # fmt: skip
    doors = PageAuthentication(listed, people(clock) if people is not None else None)
    site = PagesApp(context, doors, ROUTES)
    return Stage(site, scene, accountant, books, clock, controller, cluster, place, file, previews, tokens, applied)


def encoded(form: Mapping[str, str]) -> bytes:
    """Encode a form as a browser does."""
    return urlencode(form).encode()


def text(found: Answer) -> str:
    return unescape(found.body.decode())


def addresses(here: Stage) -> dict[tuple[str, str], str]:
    """Return one address for each route."""
    one = next(each for each in here.accountant.decisions if each.subject == "vision")
    decision = f"/shares/decision?id={one.id}&at={one.at_ms}"
    examples = {
        "/shares/queue/": "/shares/queue/vision",
        "/shares/decision": decision,
        "/shares/preview/": "/shares/preview/0000",
    }
    return {(route.method, route.prefix): examples.get(route.prefix, route.prefix) for route in ROUTES}
