"""The page Explore: the figures of the API for the same parameters, in every view and file; rights; hostile values."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from contextlib import ExitStack
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.ledger.usage import ACCOUNTS, HELD, MEASURES
from accountant.web.explore_table import COLUMNS, FIGURES, Explored, Series, Table, selected
from accountant.wire.option_types import Order
from accountant.wire.usage_cost_and_job_models import BUILT_IN as DIMENSIONS
from gputally.base.clock import VirtualClock
from gputally.base.money import exact_sum
from gputally.base.number_format import hours as hours_text
from tests.http.conftest import NOW_MS, bearer, client_of, encoded, refused, settings_in, token_entry, token_list
from tests.http.page_parser import EVIL, Reader, read
from tests.hypothesis_examples import examples
from tests.price_books import price_book_text
from tests.usage_records import QUARTER_MS, batch, deliver, interval, pod_facts, pod_holder

PAGE = {"Accept": "text/html"}
HOURS = 40
MODELS = ("NVIDIA H100 80GB HBM3", "Unpriced GPU")
INVENTORY = "schema: 1\ncluster: prod\nnamespaces:\n" + "".join(
    f"  - {{name: ns-{number}, team: {team}}}\n" for number, team in enumerate(("vision", "speech", "research"))
)
SPAN = "start=3d"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Forty hours of seven GPUs: of three teams, two models of which one has no price, and one GPU that nobody holds.
    Nobody metered the hours before."""
    begin = NOW_MS - HOURS * 4 * QUARTER_MS
    rows, facts = [], []
    for number in range(6):
        pod = f"pod-{number}" if number else "=HYPERLINK(1)"
        facts.append(
            pod_facts(
                pod,
                begin,
                namespace=f"ns-{number % 3}",
                node="node-1",
                workload=f"Job/{EVIL if number == 1 else pod}",
                labels={
                    "gputally.dev/user": f"user-{number % 2}",
                    **({} if number == 3 else {"project": f"p{number % 2}"}),
                },
                created_ms=begin,
            )
        )
        for place, at in enumerate(range(begin, NOW_MS, QUARTER_MS)):
            rows.append(
                interval(
                    at,
                    f"GPU-{number}",
                    pod_holder(pod, f"ns-{number % 3}"),
                    gpu_model=MODELS[number == 5],
                    busy_us=100_000_007 * (1 + (place + number) % 8),
                    energy_uj=10**9 * (number + 1),
                )
            )
    rows += [interval(at, "GPU-free") for at in range(begin, NOW_MS, QUARTER_MS)]
    with ExitStack() as running:
        folder = tmp_path_factory.mktemp("explore")
        tokens = token_list(token_entry("lead", "read", ", teams: [vision]"))
        given = settings_in(folder, prices=price_book_text(H100="'2.40'"), inventory=INVENTORY, tokens=tokens,
                            exported_labels=("project",))  # fmt: skip
        service = running.enter_context(Service(given, VirtualClock(NOW_MS)))
        client = client_of(service)
        sent = encoded(batch(rows, facts, cluster="prod", node="node-1"))
        assert client.post("/v1/usage", content=sent, headers=bearer("token-of-admin")).status_code == 200
        yield service


@pytest.fixture(scope="module")
def client(site: Service) -> TestClient:
    found = client_of(site)
    found.headers.update(PAGE | bearer("token-of-read"))
    return found


def table(client: TestClient, address: str) -> list[dict[str, str]]:
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


def shown(page: str) -> list[list[str]]:
    """The rows of the page's table, its totals last, each as the texts of its cells without what stands below them."""
    body = page[page.index("<tbody>") : page.index("</tfoot>")]
    body = re.sub(r'<span class="sub">.*?</span>|<a class="tag" href="/(job|node)/[^>]*>open</a>', "", body)
    rows = re.findall(r"<tr>(.*?)</tr>", body, flags=re.DOTALL)
    return [
        [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in rows
    ]


SCRIPT = [("src", "/static/zoom.js"), ("defer", None)]


def scripts(page: Reader) -> list[list[tuple[str, str | None]]]:
    """The attributes of each script of a page."""
    assert page.tags.count("script") <= 1
    found = [(name, value) for tag, name, value in page.attributes if tag == "script"]
    return [found] if "script" in page.tags else []


def hours(gpu_us: int) -> Decimal:
    return (Decimal(gpu_us) / 3_600_000_000).quantize(Decimal("1e-9"))


GROUPINGS = st.lists(
    st.sampled_from([*(name for name in DIMENSIONS if name != "hour"), "label:project"]), max_size=3, unique=True
)


@given(
    by=GROUPINGS,
    only=st.sampled_from(
        ["", "&where.namespace=ns-1", "&where.gpu_model=" + MODELS[1].replace(" ", "+"), "&where.label:project=p1"]
    ),
)
@settings(max_examples=examples(8, 60), deadline=None)
def test_every_view_has_the_figures_of_the_api(client: TestClient, by: list[str], only: str) -> None:
    query = f"{SPAN}&by={','.join(by)}{only}"
    usage, cost = (client.get(f"/v1/{name}?{query}").json() for name in ("usage", "cost"))
    expected = {tuple(line["key"].values()): line["accounts_gpu_us"] for line in usage["lines"]}
    costs = {tuple(line["key"].values()): line for line in cost["lines"]}
    names = ",".join(COLUMNS)
    *rows, total = table(client, f"/explore.csv?{query}&columns={names}")
    assert {row["record"] for row in rows} <= {"line"}
    found = {tuple(row[name].removeprefix("'") for name in by): row for row in rows}
    assert found.keys() == {tuple(key) for key in expected}
    for key, accounts in expected.items():
        row = found[key]
        for name, gpu_us in accounts.items():
            assert Decimal(row[f"{name}_gpu_hours"]) == hours(gpu_us), (key, name)
        assert Decimal(row["capacity_gpu_hours"]) == hours(sum(accounts.values()))
        priced = costs.get(key)
        assert row["cost"] == ("" if priced is None or priced["cost"] is None else row["cost"])
        if priced is not None and priced["cost"] is not None:
            assert Decimal(row["cost"]) == Decimal(priced["cost"])
            parts = Decimal(row["held_cost"]), Decimal(row["unheld_cost"])
            assert parts == (Decimal(priced["held_cost"]), Decimal(priced["unheld_cost"]))
            assert exact_sum(parts) == Decimal(priced["cost"]), "what is held and what is not add up"
            assert bool(parts[0]) == any(accounts[name] for name in HELD)
            assert bool(parts[1]) == bool(accounts["unallocated"])
        assert Decimal(row["unpriced_gpu_hours"]) == hours(0 if priced is None else priced["unpriced_gpu_us"])
    assert total["record"] == "total"
    assert (Decimal(total["cost"]) if total["cost"] else None) == (Decimal(cost["total"]) if cost["total"] else None)
    if total["cost"]:
        assert Decimal(total["held_cost"]) + Decimal(total["unheld_cost"]) == Decimal(total["cost"])
    assert Decimal(total["unpriced_gpu_hours"]) == hours(cost["unpriced_gpu_us"])
    for name in next(iter(expected.values()), {}):
        assert Decimal(total[f"{name}_gpu_hours"]) == hours(sum(accounts[name] for accounts in expected.values()))


@pytest.mark.parametrize(
    "view",
    [
        f"{SPAN}&by=team&columns=allocated,allocated_idle,unpriced",
        f"{SPAN}&by=team,pod&sort=busy:desc&columns=busy,down",
        f"{SPAN}&by=pod&sort=pod&search=POD&columns=allocated",
        f"{SPAN}&by=team,day&across=day",
        f"{SPAN}&by=gpu_model,namespace,day&across=namespace&measure=busy",
    ],
)
def test_a_file_has_the_rows_and_columns_of_the_view(client: TestClient, view: str) -> None:
    answer = client.get(f"/explore?{view}")
    assert answer.status_code == 200
    drawn = shown(answer.text)
    *rows, total = table(client, f"/explore.csv?{view}")
    texts = len([name for name in rows[0] if name in ("record", "measure", "currency", *DIMENSIONS)])
    figures = [[f"{Decimal(value):,.1f}" for value in list(row.values())[texts:]] for row in (*rows, total)]
    assert [cells[-len(figures[0]) :] for cells in drawn] == figures
    stored = pq.read_table(io.BytesIO(client.get(f"/explore.parquet?{view}").content))
    assert stored.column_names == list(rows[0])
    for name in stored.column_names[texts:]:
        assert stored.column(name).to_pylist() == [Decimal(row[name]) for row in rows]
        assert stored.schema.metadata[f"gputally.total_{name}".encode()].decode() == total[name]


def test_the_heads_of_a_file_are_text_with_a_name_each(client: TestClient) -> None:
    view = f"{SPAN}&by=team,pod&across=pod"
    text = client.get(f"/explore.csv?{view}").text
    heads = next(csv.reader(io.StringIO(text)))
    assert "'=HYPERLINK(1)" in heads
    assert not any(head.startswith("=") or not head for head in heads)
    stored = pq.read_table(io.BytesIO(client.get(f"/explore.parquet?{view}").content))
    assert len(set(stored.column_names)) == len(stored.column_names) == len(heads)
    assert all(stored.column_names)


def test_a_table_side_by_side_is_sorted_by_a_group_or_its_measure_alone(client: TestClient) -> None:
    view = f"{SPAN}&by=pod,team&across=team&measure=busy"
    largest, smallest = ([row["total"] for row in table(client, f"/explore.csv?{view}&sort={sort}")[:-1]]
                         for sort in ("busy", "busy:asc"))  # fmt: skip
    assert largest == smallest[::-1] == sorted(largest, key=Decimal, reverse=True)
    named = [row["pod"] for row in table(client, f"/explore.csv?{view}&sort=pod:desc")[:-1]]
    assert named == sorted(named, key=lambda pod: pod.removeprefix("'"), reverse=True)
    page = client.get(f"/explore?{view}&sort=down:desc", follow_redirects=False)
    assert page.status_code == 303
    assert "sort" not in dict(parse_qsl(urlsplit(page.headers["location"]).query))


def test_a_file_side_by_side_is_bounded_in_cells(tmp_path: Path) -> None:
    hours, begin = 720, NOW_MS - NOW_MS % (4 * QUARTER_MS) - 720 * 4 * QUARTER_MS
    rows = [
        interval(begin + number % hours * 4 * QUARTER_MS, f"GPU-{number // hours}", pod_holder(f"pod-{number}"))
        for number in range(1_400)
    ]
    with Service(settings_in(tmp_path), VirtualClock(NOW_MS)) as service:
        client = client_of(service)
        deliver(service.ledger, NOW_MS, batch(rows))
        view = f"start={begin}&by=pod,hour&across=hour"
        for ending in ("csv", "parquet"):
            refused(client.get(f"/explore.{ending}?{view}"), "invalid-parameter")
        assert client.get(f"/explore?{view}", headers=PAGE).status_code == 200
        assert len(table(client, f"/explore.csv?{view}&search=pod-99")) == 12


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8))
@settings(max_examples=examples(20, 200), deadline=None)
def test_sums_are_exact_beyond_64_bits_and_what_is_kept_is_counted(energies: list[int]) -> None:
    names = (*ACCOUNTS, *MEASURES)
    figures = np.zeros((len(energies), len(names)), dtype=np.int64)
    figures[:, names.index("energy_uj")] = energies
    keys, zeros = [(f"pod-{number}",) for number in range(len(energies))], [0] * len(energies)
    none = [None] * len(energies)
    rows = Table(keys, names, figures, none, zeros, zeros, none, none, none, {})
    found = Explored(0, 0, 1, rows, 1.0, None, None, None, Series(None, (), (), 0, "day", ()))
    chosen = selected(found, "", Order("energy", descending=True), ("pod",), str)
    assert chosen.total.line.energy_uj == sum(energies)
    assert chosen.nbytes >= 8 * len(energies)


@pytest.mark.parametrize(
    ("start", "end", "shown_as"),
    [
        ("2026-10-30", "2026-11-01", "30–31 October 2026"),
        ("2026-10-30T00:00:00Z", "2026-10-31T13:00:00Z", "30 Oct 2026 00:00 to 31 Oct 2026 13:00"),
    ],
)
def test_a_span_of_whole_days_is_named_by_its_days_and_any_other_by_its_instants(
    client: TestClient, start: str, end: str, shown_as: str
) -> None:
    assert shown_as in client.get(f"/explore?start={start}&end={end}&timezone=UTC&by=team").text


@pytest.mark.parametrize(("end", "step"), [("2026-10-01T17:00:00Z", 1), ("2026-10-03T09:00:00Z", 6)])
def test_a_chart_by_hour_has_labels_at_even_parts_of_the_day(client: TestClient, end: str, step: int) -> None:
    page = client.get(f"/explore?start=2026-10-01T05:00:00Z&end={end}&timezone=UTC&by=team").text
    hours = [int(hour) for hour in re.findall(r">\d+ Oct (\d\d):00</text>", page)]
    assert hours == [hour % 24 for hour in range(5, 5 + (12 if step == 1 else 52)) if hour % step == 0]


@pytest.mark.parametrize("measure", ["allocated", "busy"])
@pytest.mark.parametrize("by", ["pod", "team,pod", "pod,day", "gpu_model,pod"])
def test_the_chart_shows_what_the_search_leaves(client: TestClient, by: str, measure: str) -> None:
    page = client.get(f"/explore?{SPAN}&by={by}&search=POD-1&measure={measure}").text
    told = re.findall(r"<title>[^<]*: ([0-9.,]+) GPU-h[^<]*</title>", page)
    lines = client.get(f"/v1/usage?{SPAN}&by=hour&where.pod=pod-1").json()["lines"]
    accounts = ("busy",) if measure == "busy" else ("busy", "allocated_idle", "allocated_unknown")
    held = [sum(line["accounts_gpu_us"][name] for name in accounts) for line in lines]
    assert told == [hours_text(gpu_us) for gpu_us in held if gpu_us] != []
    nothing = client.get(f"/explore?{SPAN}&by={by}&search=nobody").text
    assert not re.findall(r"<title>[^<]*GPU-h[^<]*</title>", nothing)


def test_the_chart_of_the_cost_shows_what_the_search_leaves(client: TestClient) -> None:
    page = client.get(f"/explore?{SPAN}&by=team,pod&search=POD-1&measure=cost").text
    told = sum(Decimal(one.replace(",", "")) for one in re.findall(r"<title>[^<]*: ([0-9.,]+) EUR[^<]*</title>", page))
    total = table(client, f"/explore.csv?{SPAN}&by=team,pod&search=POD-1&columns=cost")[-1]
    assert abs(told - Decimal(total["cost"])) < Decimal("0.05"), "the columns are rounded to cents"
    assert told > 0


def test_the_span_is_narrowed_to_a_column_of_the_chart_by_a_link(client: TestClient) -> None:
    def narrower(page: str) -> dict[str, str]:
        part = page.partition("Narrow the span")[2].partition("</details>")[0]
        return {name: unescape(address) for address, name in re.findall(r'<a href="([^"]+)">([^<]+)</a>', part)}

    days = narrower(client.get("/explore?start=20d&by=team&where.team=vision").text)
    assert len(days) == 21, "the first and the last day are not whole"
    *_, before, last = days
    for name in (before, last):
        row = next(
            row for row in table(client, days[name].replace("/explore?", "/explore.csv?")) if row["team"] == "vision"
        )
        day = client.get("/v1/usage?by=day&start=20d&where.team=vision").json()["lines"][-1 if name == last else -2]
        held = sum(day["accounts_gpu_us"][one] for one in ("busy", "allocated_idle", "allocated_unknown"))
        assert Decimal(row["allocated_gpu_hours"]) == Decimal(held) / (3600 * 10**6)
        assert not narrower(client.get(days[name]).text), "a chart by hour is the finest"
    months = narrower(client.get("/explore?start=200d&by=team").text)
    assert "start=2026-10-01&end=2026-11-01" in months["Oct 2026"]


def test_a_cost_that_lacks_a_price_is_unknown_and_says_how_much_it_lacks(client: TestClient) -> None:
    page = client.get(f"/explore?{SPAN}&by=gpu_model&sort=gpu_model").text
    priced, unpriced, total = shown(page)
    assert float(priced[-1].replace(",", "")) > 0
    assert unpriced[-1] == total[-1] == "–"
    assert page.count("40.0 GPU-h unpriced") == 2, "of the model and in all"
    head = "".join(read(page).texts)
    assert "EUR" in head
    row = table(client, f"/explore.csv?{SPAN}&by=gpu_model&sort=gpu_model&columns=cost")[1]
    assert (row["cost"], row["unpriced_gpu_hours"], row["currency"]) == ("", "40.000000000", "EUR")


@pytest.mark.parametrize("only", ["", "&where.gpu_model=" + MODELS[1].replace(" ", "+")])
def test_the_chart_names_what_has_no_price_and_adds_up_nothing_without_it(client: TestClient, only: str) -> None:
    page = client.get(f"/explore?{SPAN}&by=team&measure=cost{only}").text
    legend = page[page.index('class="legend"') :].partition("</ul>")[0]
    assert "research" in legend
    told = re.findall(r"<title>([^<]*research: [^<]*)</title>", page)
    assert len(told) == HOURS
    assert not any("Together" in hour for hour in told)
    assert all("research: – EUR" in hour for hour in told)


def test_time_that_nobody_metered_is_not_zero(client: TestClient) -> None:
    page = client.get(f"/explore?{SPAN}&by=team").text
    assert "Nothing is known of it" in page, "of the hours before the first record"
    assert 'class="unknown"' in page
    assert "earlier time is unknown" in page
    assert "earlier time is unknown" not in client.get("/explore?start=2h").text
    assert "earlier time is unknown" in client.get("/explore?start=30h&compare=true").text, "of the span before"
    empty = client.get("/explore?start=2026-01-01&end=2026-01-03")
    assert empty.status_code == 200
    assert "There are no records of this span" in empty.text
    assert "nothing is known of this span" in empty.text


def test_a_view_is_compared_with_the_span_before(client: TestClient) -> None:
    query = "start=20h&by=pod&columns=busy,allocated&compare=true"
    *rows, _ = table(client, f"/explore.csv?{query}")
    first, last = ({line["key"]["pod"]: line["accounts_gpu_us"]["busy"]
                    for line in client.get(f"/v1/usage?by=pod&start={start}&end={end}").json()["lines"]}
                   for start, end in ((NOW_MS - 40 * 3_600_000, NOW_MS - 20 * 3_600_000),
                                      (NOW_MS - 20 * 3_600_000, NOW_MS)))  # fmt: skip
    for row in rows:
        pod = row["pod"].removeprefix("'")
        assert Decimal(row["busy_gpu_hours"]) == hours(last[pod])
        assert Decimal(row["busy_gpu_hours_before"]) == hours(first[pod])
    assert "before 20.0, +0.0 %" in client.get(f"/explore?{query}").text


def links(page: str) -> list[str]:
    reader: Reader = read(page)
    return [value for tag, name, value in reader.attributes if tag == "a" and name == "href"]


def test_every_link_of_a_view_leads_somewhere(client: TestClient) -> None:
    page = client.get(f"/explore?{SPAN}&by=cluster,namespace,job&where.team=vision&compare=true&sort=cost:desc")
    found = {link for link in links(page.text) if link.startswith(("/explore", "/v1/", "/job/", "/node/"))}
    assert len(found) > 25
    kinds = {re.sub(r"sort=[^&]*", "", link): link for link in found}  # of the orders one
    for link in kinds.values():
        answer = client.get(link, follow_redirects=False)
        assert answer.status_code == 200, link


def test_a_filter_is_added_by_the_form_and_removed_by_a_link(client: TestClient) -> None:
    sent = [("start", "3d"), ("end", ""), ("timezone", ""), ("by", "pod"), ("by", ""), ("by", "pod"), ("search", ""),
            ("columns", "busy"), ("columns", "cost"), ("add", "team"), ("value", "vision")]  # fmt: skip
    answer = client.get("/explore?" + urlencode(sent), follow_redirects=False)
    assert answer.status_code == 303
    view = dict(parse_qsl(urlsplit(answer.headers["location"]).query))
    assert view == {"start": "3d", "by": "pod", "where.team": "vision", "columns": "busy,cost"}
    page = client.get(answer.headers["location"])
    assert page.status_code == 200
    without = "/explore?start=3d&by=pod&columns=busy,cost"
    assert without in links(page.text)
    assert len(shown(client.get(without).text)) > len(shown(page.text))


@pytest.mark.parametrize("columns", ["cost", "busy,cost", "utilisation", "allocated,cost"])
def test_without_an_order_rows_are_in_that_of_a_column_which_is_shown_and_marked(
    client: TestClient, columns: str
) -> None:
    page = client.get(f"/explore?{SPAN}&by=pod&columns={columns}").text
    (head,) = re.findall(r'<th[^>]* aria-sort="descending"><a [^>]*>([^<]*) ↓</a>', page)
    first = next(name for name in COLUMNS if name in columns.split(","))
    assert head == FIGURES[first].title
    rows = table(client, f"/explore.csv?{SPAN}&by=pod&columns={columns}")
    values = [row[next(name for name in row if name.startswith(first))] for row in rows if row["record"] == "line"]
    known = [Decimal(value) for value in values if value]
    assert known == sorted(known, reverse=True)


def test_time_that_nobody_held_is_apart_in_the_row_without_a_name(client: TestClient) -> None:
    page = client.get(f"/explore?{SPAN}&by=user&columns=cost").text
    (row,) = [row for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if re.search(r"<th[^>]*><a [^>]*>–</a>", row)]
    assert re.search(r"<span[^>]*>not held<", row)
    (address,) = re.findall(r'<a href="([^"]*)"[^>]*>–<', row)
    parts = client.get(unescape(address), follow_redirects=False)
    assert parts.status_code == 200
    assert "User: –" in parts.text
    assert "/explore.csv" in parts.text
    lines = table(client, f"/explore.csv?{SPAN}&by=user,namespace&where.user=&columns=unallocated")
    assert {line["user"] for line in lines if line["record"] == "line"} == {""}
    assert not re.search(r"<span[^>]*>not held<", client.get(f"/explore?{SPAN}&by=team&columns=cost").text)


@pytest.mark.parametrize("by", ["job", "user,job", "cluster,job", "job,day"])
def test_a_row_by_job_leads_to_the_page_of_the_job(client: TestClient, by: str) -> None:
    page = client.get(f"/explore?{SPAN}&by={by}").text
    links = {unescape(link) for link in re.findall(r'href="(/job/[^"]*)"', page)}
    assert len(links) == 6
    for link in links:
        assert client.get(link).status_code == 200


def test_an_order_by_a_grouping_that_is_gone_is_left(client: TestClient) -> None:
    assert client.get(f"/explore?{SPAN}&by=pod&sort=team&across=day").status_code == 200


def test_long_lists_have_pages_to_the_end(client: TestClient) -> None:
    address, seen = f"/explore?{SPAN}&by=pod,hour&columns=busy", 0
    following: str | None = address
    while following is not None:
        page = client.get(following).text
        seen += len(shown(page)) - 1
        nexts = re.findall(r'href="([^"]*)" rel="next"', page)
        following = nexts[0].replace("&amp;", "&") if nexts else None
    assert seen == len(table(client, f"/explore.csv?{SPAN}&by=pod,hour&columns=busy")) - 1 > 200


def test_a_team_sees_only_its_own(site: Service) -> None:
    client = client_of(site)
    client.headers.update(PAGE | bearer("lead"))
    page = client.get(f"/explore?{SPAN}")
    assert page.status_code == 200
    assert "/explore?start=7d&by=job" in links(page.text), "grouped by job, because it has one team"
    for by in ("team", "job", "gpu", "node", "user", "day"):
        rows = table(client, f"/explore.csv?{SPAN}&by={by},namespace")
        assert {row["namespace"] for row in rows if row["record"] == "line"} == {"ns-0"}, by
    for path in ("/explore", "/explore.csv", "/explore.parquet"):
        assert client.get(f"{path}?{SPAN}&where.team=speech").status_code == 403
        assert client.get(f"{path}?{SPAN}&where.team=vision").status_code == 200


HOSTILE = [
    "by=nothing", "by=team,user,job,pod,node,cluster,gpu", "columns=x", "sort=x:desc", "sort=-x",
    "measure=x", "across=x", "page=0",
    "page=-1", "page=99999999", "start=yesterday", "start=2026-11-01T09:00:00", "end=1d&start=2026-12-01",
    "timezone=Mars/Base", "where.moon=x", "where.team=nobody", "start=1000000d", "start=0001-01-01", "compare=perhaps",
    "add=moon&value=x", "search=" + "x" * 300, "value=" + "x" * 2_000, "columns=" + ",".join(["busy"] * 60), "%00=1",
    "search=%00", "sort=" + "-" * 41,
]  # fmt: skip


@pytest.mark.parametrize("query", HOSTILE)
@pytest.mark.parametrize("path", ["/explore", "/explore.csv", "/explore.parquet"])
def test_what_is_no_view_is_refused_with_a_reason(client: TestClient, path: str, query: str) -> None:
    answer = client.get(f"{path}?{query}", headers={"Accept": "application/json"}, follow_redirects=False)
    assert answer.status_code in (404, 422), answer.text
    refused(answer, "not-found" if answer.status_code == 404 else "invalid-parameter")


def test_too_large_a_view_is_refused_as_by_the_api(tmp_path: Path) -> None:
    with Service(settings_in(tmp_path, limits={"question_gpu_hours": 10}), VirtualClock(NOW_MS)) as service:
        client = client_of(service)
        rows = [interval(NOW_MS - QUARTER_MS * n, "GPU-1") for n in range(1, 200)]
        assert client.post("/v1/usage", content=encoded(batch(rows))).status_code == 200
        for path in ("/v1/usage", "/explore", "/explore.csv", "/explore.parquet"):
            refused(client.get(f"{path}?start=2d"), "invalid-parameter")


@given(text=st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30), where=st.sampled_from(DIMENSIONS))
@settings(max_examples=examples(10, 100), deadline=None)
def test_any_text_is_a_search_or_a_filter_and_only_text(client: TestClient, text: str, where: str) -> None:
    view: dict[str, Any] = {"start": "3d", "by": "pod", "search": text}
    answer = client.get("/explore?" + urlencode(view))
    assert answer.status_code == 200
    assert scripts(read(answer.text)) == [SCRIPT]
    added = client.get("/explore?" + urlencode({**view, "add": where, "value": text}))
    assert added.status_code == 200 or (added.status_code, where) == (404, "team")


def test_names_are_text_on_the_page_and_in_cells(client: TestClient) -> None:
    page = client.get(f"/explore?{SPAN}&by=job,pod").text
    reader = read(page)
    assert scripts(reader) == [SCRIPT]
    assert any(EVIL in text for text in reader.texts)
    cells = {row["pod"] for row in table(client, f"/explore.csv?{SPAN}&by=pod")}
    assert "'=HYPERLINK(1)" in cells


def test_the_columns_of_a_chart_say_their_span_for_the_script_that_zooms(client: TestClient) -> None:
    def edges(query: str) -> list[tuple[str, str]]:
        page = client.get(f"/explore?{query}&by=team&timezone=Europe/Berlin").text
        return re.findall(r'<g data-start="([^"]*)" data-end="([^"]*)">', page)

    days = edges("start=2026-10-25T10:00:00Z&end=2026-11-01")
    assert days[0] == ("2026-10-25T10:00:00Z", "2026-10-26")
    assert days[1:3] == [("2026-10-26", "2026-10-27"), ("2026-10-27", "2026-10-28")]
    assert days[-1] == ("2026-10-31", ""), "the last column ends where the page does"
    hours = edges("start=2026-10-31T22:30:00Z&end=2026-11-01T01:00:00Z")
    assert hours == [
        ("2026-10-31T22:30:00Z", "2026-10-31T23:00:00Z"), ("2026-10-31T23:00:00Z", "2026-11-01T00:00:00Z"),
        ("2026-11-01T00:00:00Z", ""),
    ]  # fmt: skip
    assert edges("start=200d")[1] == ("2026-05-01", "2026-06-01")


def test_explore_lets_its_own_script_run_and_no_other(client: TestClient) -> None:
    page = client.get(f"/explore?{SPAN}&by=team")
    policy = page.headers["content-security-policy"]
    assert [part.strip() for part in policy.split(";") if "script-src" in part] == ["script-src 'self'"]
    (script,) = scripts(read(page.text))
    source = client.get(dict(script)["src"] or "")
    assert source.headers["content-type"].startswith("text/javascript")
    assert len(source.content) < 120_000
    assert "script-src" not in client.get("/jobs").headers["content-security-policy"]
