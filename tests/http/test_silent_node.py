"""A node whose agent is silent hides nothing of the others: what they hold is shown as of now, and its own GPUs are
named as unknown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from accountant.composition import Service
from agent.wire import PodFacts
from gputally.base.clock import VirtualClock
from gputally.base.number_format import NOTHING
from tests.fakes.memory_ledger import NOW_MS
from tests.http.conftest import INVENTORY, client_of, settings_in
from tests.http.page_parser import Reader, read, rows_after
from tests.http.quarter_hours import HOUR_MS, held
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, pod_facts

DAYS = 5


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    """n1 and n2 report, vision holds a GPU of n1, and nobody that of n2. n3, on which nlp ran, is silent for five
    days, and before it fell silent nothing was held elsewhere."""
    chosen = settings_in(tmp_path, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY)
    rest = DAYS * 24 + 2
    with Service(chosen, clock) as running:
        deliver(
            running.ledger, NOW_MS,
            batch([*held(rest, rest - 4, "GPU-1"), *held(4, 4, "GPU-1", "vision")], cluster="prod", node="n1"),
            batch(held(rest, rest, "GPU-2"), cluster="prod", node="n2"),
            batch(held(rest, 2, "GPU-3", "nlp"), cluster="prod", node="n3"),
        )  # fmt: skip
        yield running


def home(service: Service) -> Reader:
    answer = client_of(service).get("/", headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    return read(answer.text)


def test_what_is_known_is_shown_as_of_now(service: Service) -> None:
    found = home(service)
    caption = "GPUs by account"
    rows = {name: rows_after(found, caption, name)[0] for name in ("Allocated, idle", "Unallocated", "Capacity")}
    assert rows == {"Allocated, idle": "1", "Unallocated": "1", "Capacity": "3"}
    assert "vision" in rows_after(found, "Workloads and the GPUs they hold", "Pod/vision-0")
    assert any(str(text).startswith("1 Nov 11:45") for text in found.texts)


def test_the_gpus_of_a_silent_node_are_unknown(service: Service) -> None:
    found = home(service)
    assert rows_after(found, "GPUs by account", "Unmetered")[0] == "1"
    cells = [value for tag, name, value in found.attributes if (tag, name) == ("a", "aria-label")]
    assert [cell for cell in cells if cell.startswith("GPU-")] == [
        "GPU-1: vision", "GPU-2: unallocated", "GPU-3: unmetered",
    ]  # fmt: skip
    row = rows_after(found, "GPUs of each node", "n3")
    assert "unknown" in row
    assert "nlp" not in row
    links = [value for tag, name, value in found.attributes if (tag, name) == ("a", "href")]
    assert {"/node/prod/n3", "/nodes?sort=silent"} <= set(links)


def test_the_page_of_a_silent_node_knows_nothing_of_the_month(service: Service) -> None:
    """It held something in October, and in November nobody knows."""
    now, then = (
        read(client_of(service).get("/group", params={"by": "node", "value": "n3", "month": month}).text).texts
        for month in ("2026-11", "2026-10")
    )
    assert figure(now, "Held") == figure(now, "Busy") == figure(now, "Idle") == NOTHING
    assert figure(then, "Held") == "2.0"


@pytest.mark.parametrize(("node", "state"), [("n1", "reports"), ("n3", "silent")])
def test_the_page_of_a_node_says_whether_it_reports(service: Service, node: str, state: str) -> None:
    page = client_of(service).get(f"/node/prod/{node}", headers={"Accept": "text/html"}).text
    assert figure(read(page).texts, "State") == state


def figure(texts: list[str], card: str) -> str:
    """The figure of a card of the headline."""
    found = [text.strip() for text in texts if text.strip()]
    return found[found.index(card) + 1]


def test_the_page_of_a_node_that_reports_is_whole(service: Service) -> None:
    page = client_of(service).get("/group", params={"by": "node", "value": "n1", "month": "2026-11"}).text
    assert figure(read(page).texts, "Held") == "4.0"
    assert "not metered" not in page


def states(service: Service) -> dict[str, str]:
    listed = client_of(service).get("/v1/jobs?start=10d").json()["jobs"]
    return {job["namespace"]: job["state"] for job in listed}


def pod(space: str, node: str, **more: int) -> PodFacts:
    began = NOW_MS - (DAYS * 24 + 2) * HOUR_MS
    return pod_facts(
        f"{space}-0", began, namespace=space, node=node, uid=space, created_ms=began, scheduled_ms=began,
        started_ms=began, **more,
    )  # fmt: skip


@pytest.mark.parametrize("known", [False, True])
def test_whether_a_job_on_a_silent_node_still_runs_is_unknown(service: Service, known: bool) -> None:
    if known:
        facts = [[pod("vision", "n1")], [pod("nlp", "n3")]]
        for node, some in zip(("n1", "n3"), facts, strict=True):
            deliver(
                service.ledger,
                NOW_MS,
                batch([], some, cluster="prod", node=node, epoch="later"),
            )
    assert states(service) == {"vision": "running", "nlp": "unknown"}
    client = client_of(service)
    (job,) = client.get("/v1/jobs?start=10d&state=unknown").json()["jobs"]
    assert (job["gpus"], job["burn_per_hour"]) == (None, None)
    rows = csv.DictReader(io.StringIO(client.get("/jobs.csv?start=10d&columns=gpus,burn").text))
    assert {row["namespace"]: row["gpus_now"] for row in rows} == {"vision": "1.0", "nlp": ""}
    assert "what it holds is unknown" in client.get(f"/job/{job['id']}", headers={"Accept": "text/html"}).text
    (attempt,) = client.get(f"/v1/jobs/{job['id']}").json()["attempts"]
    assert (attempt["end"], attempt["lost_gpu_us"]) == ("unknown", None)
    page = client.get(f"/job/{job['id']}", headers={"Accept": "text/html"}).text
    assert "silent" in page


def test_a_job_that_ended_before_its_node_fell_silent_ended(service: Service) -> None:
    """One that held a GPU of the silent node until an hour before its last record."""
    deliver(
        service.ledger, NOW_MS,
        batch(held(DAYS * 24 + 2, 1, "GPU-4", "lab"), cluster="prod", node="n3", epoch="later"),
    )  # fmt: skip
    assert states(service)["lab"] == "ended"
    assert states(service)["nlp"] == "unknown"


def test_a_pod_that_is_known_to_have_ended_on_a_silent_node_ended(service: Service) -> None:
    ended = pod("nlp", "n3", ended_ms=NOW_MS - HOUR_MS)
    deliver(
        service.ledger,
        NOW_MS,
        batch([], [ended], cluster="prod", node="n3", epoch="later"),
    )
    assert states(service)["nlp"] == "ended"


def missing(service: Service) -> list[str]:
    """The texts of the page's table of missing records, from its first row on."""
    answer = client_of(service).get("/coverage", headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    texts = [text.strip() for text in read(answer.text).texts if text.strip()]
    return texts[texts.index("What to do") + 1 :]


def test_the_page_of_coverage_says_when_a_node_lacks_records_why_and_what_to_do(service: Service) -> None:
    start, end, node, cluster, hours, why, what = missing(service)[:7]
    assert (start, end, node, cluster, hours) == ("1 Nov 00:00", "1 Nov 12:00", "n3", "prod", "12.0")
    assert "no later record" in why
    assert "agent" in what


def test_a_gap_between_records_has_its_hours(tmp_path: Path, clock: VirtualClock) -> None:
    """n1 lacks the three hours before 9:00."""
    chosen = settings_in(tmp_path, inventory=INVENTORY)
    with Service(chosen, clock) as running:
        deliver(
            running.ledger, NOW_MS,
            batch([*held(11, 5, "GPU-1"), *held(3, 3, "GPU-1")], cluster="prod", node="n1"),
        )  # fmt: skip
        (start, end, node, _, hours, why, what) = missing(running)[:7]
        assert (start, end, node, hours) == ("1 Nov 06:00", "1 Nov 09:00", "n1", "3.0")
        assert why
        assert what
        assert missing(running)[7] != "n1", "one gap is one row"
