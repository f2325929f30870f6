"""Generated requests to a real accountant, from its OpenAPI document as every role, and generated bodies of its input
types. No answer is a 5xx, and memory returns to about its value at the start.

`make test` tries some dozens, `make test-real` more than 20,000 of each kind."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from gputally.base.yaml_file import FileFault, parse
from gputally.server.tokens_and_grants import Callers
from tests.attacks.conftest import PRICES, ROLES, Running
from tests.attacks.edges import DECIMALS, FLOATS, IDS, INSTANTS, INTEGERS
from tests.hypothesis_examples import THOROUGH, examples

if TYPE_CHECKING:
    from schemathesis import Case

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]
UNBOUND = ("", "made.up.token")
MEMORY_TIMES = 1.5
NOW_MS = 1_793_534_400_000


def quiet(few: int, many: int) -> settings:
    return settings(
        max_examples=examples(few, many),
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def idle_mib(running: Running) -> int:
    """Return the memory after one request of each kind."""
    for path in ("/openapi.json", "/", "/v1/usage", "/v1/report", "/v1/statement", "/v1/windows", "/metrics"):
        httpx2.get(running.url + path, headers={"Authorization": "Bearer admin"}, timeout=60)
    return running.memory_mib()


@pytest.fixture(autouse=True)
def within_memory(running: Running, idle_mib: int) -> Any:
    yield
    assert running.process.poll() is None
    if THOROUGH:
        assert running.memory_mib() <= idle_mib * MEMORY_TIMES


@pytest.mark.parametrize("role", [*ROLES, *UNBOUND])
def test_requests_made_from_the_document_never_meet_a_defect(running: Running, role: str) -> None:
    import schemathesis

    document = schemathesis.openapi.from_dict(httpx2.get(running.url + "/openapi.json").json())
    operations = [found.ok() for found in document.get_all_operations()]
    each = examples(1, 25 if role == "admin" else 8)  # most that the others ask is refused at the door
    statuses: Counter[int] = Counter()
    with httpx2.Client(base_url=running.url, timeout=60) as client:
        for operation in operations if THOROUGH else operations[:: len(ROLES)]:
            for mode in ("positive", "negative"):
                if mode == "negative" and not (operation.query or operation.path_parameters or operation.body):
                    continue

                @seed(20261101)
                @settings(quiet(1, 1), max_examples=each)
                @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
                def ask(case: Case) -> None:
                    caller = {"Authorization": f"Bearer {role}"}
                    answer = case.call(base_url=running.url, headers=caller, timeout=60)
                    statuses[answer.status_code] += 1
                    assert answer.status_code < 500 or _may(answer.status_code, answer.text), answer.text

                ask()
        assert client.get("/readyz").status_code == 200
    assert not THOROUGH or statuses.total() > 100 * each


def _may(status: int, text: str) -> bool:
    """Return whether the status is allowed. A form that this machine cannot produce is not a defect."""
    return status == 501 and "cannot-render" in text


TEXT = st.text(max_size=40) | st.sampled_from([*IDS, *INSTANTS, *DECIMALS, "../..", "'; DROP TABLE usage; --"])
NUMBER = st.integers(0, 100) | st.integers(-(2**80), 2**80) | st.sampled_from([*INTEGERS, NOW_MS])
ODD = st.none() | st.booleans() | NUMBER | TEXT | st.floats() | st.sampled_from(FLOATS) | st.just([]) | st.just({})


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Generate usual values, and sometimes any value."""
    return st.integers(0, 19).flatmap(lambda chance: ODD if chance == 0 else usual)


def record(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: mostly(values) for name, values in fields.items()})


INTERVAL = record(
    seq=st.integers(0, 12),
    start_ms=st.sampled_from([NOW_MS - 120_000, NOW_MS - 60_000]) | NUMBER,
    end_ms=st.sampled_from([NOW_MS - 60_000, NOW_MS]) | NUMBER,
    gpu_uuid=st.sampled_from(["GPU-1", "GPU-2"]) | TEXT,
    gpu_model=st.just("NVIDIA H100 80GB HBM3") | TEXT,
    holder=st.none()
    | record(kind=st.sampled_from(["pod", "slurm", "unattributed"]), uid=TEXT, namespace=TEXT, name=TEXT),
    capacity_us=st.just(60_000_000) | NUMBER,
    allocated_us=st.just(60_000_000) | NUMBER,
    busy_us=st.none() | st.just(30_000_000) | NUMBER,
    energy_uj=st.none() | NUMBER,
    memory_mib_s=st.none() | NUMBER,
    method=st.sampled_from(["device", "simulated", "carried", "imported"]),
    gaps=st.lists(record(start_ms=NUMBER, end_ms=NUMBER, reason=TEXT), max_size=2),
)
FACT = record(
    seq=st.integers(0, 12),
    uid=TEXT,
    namespace=TEXT,
    name=TEXT,
    node=TEXT,
    workload=TEXT,
    queue_ref=TEXT,
    labels=st.dictionaries(TEXT, TEXT, max_size=3),
    requests=st.dictionaries(TEXT, TEXT, max_size=3),
    priority=st.none() | NUMBER,
    created_ms=st.none() | NUMBER,
    ended_ms=st.none() | NUMBER,
    observed_ms=NUMBER,
)
SKIPPED = record(seq=st.integers(0, 12), reason=TEXT)


def batch(**lists: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return record(
        schema=st.just(1),
        cluster=st.just("prod") | TEXT,
        node=st.just("node-1") | TEXT,
        boot_id=TEXT,
        epoch=st.just("01930000-0000-7000-8000-000000000000") | TEXT,
        first_seq=st.integers(0, 3) | NUMBER,
        oldest_seq=st.integers(0, 3) | NUMBER,
        **lists,
    )


QUEUE = record(name=TEXT, parent=TEXT, team=TEXT, deserved=NUMBER | st.floats(0, 10), weight=NUMBER, limit=NUMBER)
POLICY = record(
    schema=st.just(1),
    queues=st.lists(QUEUE, max_size=4),
    window=record(size=st.just("7d") | TEXT, half_life=st.just("1d") | TEXT),
    measure=st.just("allocated"),
    budgets=st.lists(record(name=TEXT, team=TEXT, limit=NUMBER | TEXT), max_size=2),
)
SURFACES: dict[str, tuple[str, str, str, st.SearchStrategy[Any]]] = {
    "intervals": ("POST", "/v1/usage", "agent", batch(intervals=st.lists(INTERVAL, max_size=4))),
    "facts": (
        "POST",
        "/v1/usage",
        "agent",
        batch(facts=st.lists(FACT, max_size=3), skipped=st.lists(SKIPPED, max_size=2)),
    ),
    "policy": ("PUT", "/v1/policy", "governor", POLICY),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_what_has_the_structure_of_a_request_never_meets_a_defect(running: Running, surface: str) -> None:
    method, path, role, strategy = SURFACES[surface]
    with httpx2.Client(base_url=running.url, timeout=60) as client:

        @seed(20261101)
        @quiet(20, 4_000)
        @given(value=strategy, packed=st.booleans())
        def send(value: Any, packed: bool) -> None:
            raw = json.dumps(value).encode()
            headers = {"Authorization": f"Bearer {role}"}
            if packed:
                raw, headers["Content-Encoding"] = gzip.compress(raw, 1), "gzip"
            answer = client.request(method, path, content=raw, headers=headers)
            assert answer.status_code < 500, (answer.text, value)

        send()
        assert client.get("/readyz").status_code == 200


LINES = st.lists(
    st.sampled_from(
        [
            "&a [*a]",
            "<<: *a",
            "a: &a {b: c}",
            "- *a",
            "? [a]",
            "!!python/object:os.system x",
            "- {a: [*a, *a]}",
            "rows:",
            "price: .inf",
            "price: 1e999999",
            "price: true",
            "\t",
            "%YAML 9.9",
            "---",
            "...",
            "'",
            '"\\u0000"',
            "a: !!binary x",
            "a: !!timestamp 2026-99-99",
            "a: 2026-01-01T00:00:00+99:00",
            "- 0x_",
            "- 1__0",
            "!!int ''",
            "!!float x",
            "a: !!set {b}",
        ]
    )
    | st.text(max_size=30),
    max_size=8,
).map("\n".join)
MUTATED = st.tuples(st.integers(0, len(PRICES) - 1), st.integers(0, 20), TEXT).map(
    lambda cut: PRICES[: cut[0]] + cut[2] + PRICES[cut[0] + cut[1] :]
)


@pytest.mark.parametrize("text", [LINES, MUTATED], ids=["yaml", "prices"])
def test_made_up_price_books_never_meet_a_defect(running: Running, text: st.SearchStrategy[str]) -> None:
    with httpx2.Client(base_url=running.url, timeout=60) as client:

        @seed(20261101)
        @quiet(20, 4_000)
        @given(content=text)
        def send(content: str) -> None:
            raw = content.encode("utf-8", "surrogatepass")
            answer = client.post(
                "/v1/prices/preview?month=2026-10", content=raw, headers={"Authorization": "Bearer admin"}
            )
            assert answer.status_code < 500, (answer.text, content)

        send()


CALLERS = record(
    schema=st.just(1),
    issuers=st.lists(
        record(issuer=TEXT, audience=TEXT, jwks_file=TEXT, user=TEXT, groups=TEXT, clients=st.lists(TEXT, max_size=2)),
        max_size=2,
    ),
    certificates=st.lists(record(name=TEXT, cluster=TEXT), max_size=2),
    grants=st.lists(
        record(users=st.lists(TEXT, max_size=2), scopes=st.just(["read"]), teams=st.lists(TEXT)), max_size=2
    ),
)


@seed(20261101)
@quiet(20, 4_000)
@given(text=CALLERS.map(lambda value: yaml.safe_dump(value, allow_unicode=True)) | LINES)
def test_a_made_up_callers_file_is_read_or_refused_with_its_place(text: str) -> None:
    from gputally.server.config_loading import validate

    try:
        validate(parse(text, "callers.yaml"), Callers)
    except FileFault as fault:
        found = fault.faults
    else:
        found = ()
    assert all(line.startswith("callers.yaml:") for line in found)
