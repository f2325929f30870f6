"""Who held each GPU of a node at an instant, and which agents report, on a real ledger with figures computed by
hand."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.ledger.protocols import Down, Facts, NodeFacts
from accountant.storage import read_snapshot
from agent.wire import UsageInterval
from gputally.base.clock import VirtualClock
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.http.conftest import INVENTORY, bearer, client_of, settings_in, token_entry
from tests.http.page_parser import read
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

BEGIN = NOW_MS - 120 * MINUTE_MS


def minutes(first: int, last: int, gpu: str, uid: str = "", space: str = "") -> list[UsageInterval]:
    holder = pod_holder(f"pod-{uid}", space, uid) if uid else None
    return [interval(BEGIN + at * MINUTE_MS, gpu, holder, span_ms=MINUTE_MS) for at in range(first, last)]


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[Service]:
    """GPU-1 of n1 is held by vision/train for an hour and then by nlp/eval; GPU-2 by nobody. n2 fell silent after an
    hour, and was down for ten minutes before."""
    chosen = settings_in(
        tmp_path, prices=price_book_text(H100=6, currency="USD"), inventory=INVENTORY,
        tokens="tokens:\n" + token_entry("all", "admin") + token_entry("nlp", "read", ", teams: [nlp]"),
    )  # fmt: skip
    facts = [
        pod_facts(f"pod-{uid}", BEGIN, namespace=space, node="n1", uid=uid, workload=f"Job/{job}", created_ms=BEGIN)
        for uid, space, job in (("a", "vision", "train"), ("b", "nlp", "eval"))
    ]
    first = [
        *minutes(0, 60, "GPU-1", "a", "vision"), *minutes(60, 120, "GPU-1", "b", "nlp"), *minutes(0, 120, "GPU-2"),
    ]  # fmt: skip
    with Service(chosen, clock) as running:
        deliver(
            running.ledger, NOW_MS, batch(first, facts, cluster="prod", node="n1"),
            batch(minutes(0, 60, "GPU-3"), cluster="prod", node="n2"),
        )  # fmt: skip
        down = Down(BEGIN + 50 * MINUTE_MS, BEGIN + 60 * MINUTE_MS, "kernel panic")
        running.ledger.observe(Facts(nodes=(NodeFacts("prod", "n2", down=(down,)),)), NOW_MS)
        yield running


def page(service: Service, path: str, status: int = 200, who: str = "all") -> Any:
    answer = client_of(service).get(path, headers=bearer(who) | {"Accept": "text/html"})
    assert answer.status_code == status, answer.text
    return read(answer.text)


def local(at_ms: int) -> str:
    """An instant as a form sends it; the ledger's zone is UTC."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%dT%H:%M}"


def links(found: Any) -> set[str]:
    return {value for tag, name, value in found.attributes if (tag, name) == ("a", "href")}


@pytest.mark.parametrize(("minute", "mine", "other"), [(30, "vision~Job~train", "nlp~Job~eval"),
                                                       (59, "vision~Job~train", "nlp~Job~eval"),
                                                       (60, "nlp~Job~eval", "vision~Job~train")])  # fmt: skip
def test_a_node_says_who_held_each_gpu_at_an_instant(service: Service, minute: int, mine: str, other: str) -> None:
    at = BEGIN + minute * MINUTE_MS
    query = {"by": "gpu,pod,team", "start": at, "end": at + MINUTE_MS, "where.node": "n1"}
    lines = client_of(service).get("/v1/usage", params=query, headers=bearer("all")).json()["lines"]
    (held,) = [line["key"] for line in lines if line["key"]["pod"]]
    found = page(service, f"/node/prod/n1?at={local(at)}")
    table = _table(found.texts, "Who held each GPU")
    assert held["pod"] in table
    assert held["team"] in table
    assert "unallocated" in table.lower(), "GPU-2"
    assert mine.split("~")[-1] in table
    assert other.split("~")[-1] not in table


def test_the_holds_of_the_day_have_their_exact_ends(service: Service) -> None:
    """Both jobs are linked from the list of the day, from which the drawing is made."""
    found = page(service, f"/node/prod/n1?at={local(BEGIN)}")
    assert {"/job/prod~vision~Job~train", "/job/prod~nlp~Job~eval"} <= links(found)
    text = " ".join(found.texts)
    assert f"{datetime.fromtimestamp((BEGIN + 60 * MINUTE_MS) / 1000, UTC):%H:%M}" in text


def test_holds_that_are_left_out_are_said(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = " ".join(page(service, f"/node/prod/n1?at={local(BEGIN)}").texts)
    monkeypatch.setattr(read_snapshot, "MOST_HOLDS", 1)
    cut = page(service, f"/node/prod/n1?at={local(BEGIN)}")
    assert "leave gaps" in " ".join(cut.texts)
    assert "leave gaps" not in whole


def test_an_instant_that_is_none_is_refused(service: Service) -> None:
    page(service, "/node/prod/n1?at=yesterday", 422)
    page(service, f"/node/prod/n1?at={local(NOW_MS + 86_400_000)}", 422)
    page(service, "/node/prod/n1", 403, who="nlp")


def test_the_list_says_which_agents_report_and_which_nodes_were_down(service: Service) -> None:
    found = page(service, "/nodes?sort=down")
    nodes = [text for text in found.texts if text.strip() in ("n1", "n2")]
    assert nodes[0].strip() == "n2", "the longest down time first"
    text = " ".join(found.texts)
    assert "silent" in text
    assert "kernel panic" in text
    page(service, "/nodes?sort=nonsense", 422)


def _table(texts: list[str], caption: str) -> str:
    """The texts after a caption, up to the next caption or the end of the table."""
    start = next(i for i, text in enumerate(texts) if text.startswith(caption))
    end = next((i for i in range(start + 1, len(texts)) if texts[i].startswith("Holds of")), len(texts))
    return " ".join(texts[start:end])
