"""The same question has the same amount on Home, Month, Explore, Invoices, the pages of teams and jobs, in files and by
the command, on a ledger whose amounts no cent divides."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from accountant.composition import Service
from accountant.exports.protocol import exports
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from tests.fakes.memory_ledger import NOW_MS
from tests.http.conftest import CommandLine, client_of, settings_in
from tests.http.page_parser import plain, tables
from tests.http.quarter_hours import held
from tests.plugin_cases import registered
from tests.price_books import price_book_text
from tests.usage_records import batch, deliver

PAGE = {"Accept": "text/html"}
TEAMS = ("nlp", "speech", "vision")
INVENTORY = "schema: 1\ncluster: prod\nnamespaces:\n" + "".join(
    f"  - {{name: {name}, team: {name}}}\n" for name in TEAMS
)
MONTHS = ("2026-10", "2026-11")
EDGES = {"2026-10": "2026-11-01", "2026-11": "2026-12-01"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Three teams and time that nobody holds, on the last days of October and the first of November."""
    prices = price_book_text(H100="2.13337", currency="USD")
    chosen = settings_in(tmp_path_factory.mktemp("amounts"), prices=prices, inventory=INVENTORY)
    rows = [
        *held(61, 3, "GPU-1", "vision"), *held(47, 11, "GPU-1", "nlp"), *held(31, 7, "GPU-2", "speech"),
        *held(22, 5, "GPU-2", "nlp"), *held(9, 4, "GPU-1", "vision"), *held(11, 3, "GPU-3", "speech"),
        *held(7, 1, "GPU-2", "nlp"),
        *held(5, 5, "GPU-4"),
    ]  # fmt: skip
    with Service(chosen, VirtualClock(NOW_MS)) as service:
        deliver(service.ledger, NOW_MS, batch(rows, cluster="prod", node="n1"))
        yield service


@pytest.fixture(scope="module")
def client(running: Service) -> TestClient:
    return client_of(running, headers=PAGE)


def amounts_in(text: str, caption: str, column: int = -1) -> dict[str, Decimal]:
    """The amounts in a column of a page's table, by the first word of their rows."""
    rows = next(rows for name, (_, rows) in tables(text).items() if name.startswith(caption))
    return {plain(row[0]).split()[0]: amount_of(row[column]) for row in rows if plain(row[column]) != "–"}


def amount_of(cell: str) -> Decimal:
    found = re.search(r"-?[\d,]+\.\d\d(?!\d)", plain(cell).replace("−", "-"))
    assert found is not None, cell
    return Decimal(found[0].replace(",", ""))


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def explored(client: TestClient, start: str, end: str) -> dict[str, Decimal]:
    text = client.get(f"/explore?start={start}&end={end}&by=team&columns=cost").text
    return {name: amount for name, amount in amounts_in(text, "GPU time and cost by").items() if name in TEAMS}


def in_csv(text: str) -> dict[str, Decimal]:
    """The payable amounts in the CSV file of a report."""
    found = {row["team"]: Decimal(row["cost"]) for row in rows_of(text) if row["record"] == "payable"}
    return {name: amount for name, amount in found.items() if name in TEAMS}


def in_json(text: str) -> dict[str, Decimal]:
    """The costs in the table of teams in the JSON file of a report."""
    return {row["team"]: Decimal(row["cost"]) for row in json.loads(text)["tables"]["teams"]}


@pytest.mark.parametrize("month", MONTHS)
def test_a_team_has_one_amount_for_a_month_on_every_page_and_in_every_file(
    client: TestClient, running: Service, run_command: CommandLine, month: str
) -> None:
    month_page = client.get(f"/month/{month}").text
    expected = explored(client, f"{month}-01", EDGES[month])
    assert set(expected) == set(TEAMS)
    ways: dict[str, Callable[[], dict[str, Decimal]]] = {
        "Month": lambda: amounts_in(month_page, "Teams, the largest first", 7),
        "a team's page": lambda: {
            team: amount_of(client.get(f"/team/{team}?month={month}").text.partition('class="value"')[2][:300])
            for team in TEAMS
        },
        "Invoices": lambda: amounts_in(client.get("/invoices").text, f"Invoices of {month}", 2),
        "CSV of invoices": lambda: {
            row["team"]: Decimal(row["amount"]) for row in rows_of(client.get("/invoices.csv").text)
            if row["month"] == month
        },
        "lines": lambda: {team: figure_of(client, f"/month/{month}/lines?team={team}") for team in TEAMS},
        "statement": lambda: {
            team: Decimal(amount)
            for team, amount in client.get(f"/v1/statement?month={month}").json()["payable"].items() if team in TEAMS
        },
    }  # fmt: skip
    if month == MONTHS[-1]:
        ways["Home"] = lambda: amounts_in(client.get("/").text, "Teams, the largest first", 4)
    for name, way in ways.items():
        assert way() == expected, name
    with serve(running.app, "127.0.0.1", 0) as url:
        if registered("exports.json"):
            assert in_json(run_command.at(url).shown("report", month, "--format", "json")) == expected


def test_a_team_has_one_mean_of_weekdays_and_of_weekends_on_its_pages_and_in_explore(tmp_path: Path) -> None:
    """30 October 2026 is a Friday, 31 October a Saturday. Nothing is known of the days before, and the next is not
    over."""
    chosen = settings_in(tmp_path, prices=price_book_text(H100="2.13337", currency="USD"), inventory=INVENTORY)
    rows = [*held(66, 60, "GPU-1", "nlp"), *held(66, 47, "GPU-2", "nlp"), *held(19, 13, "GPU-2", "vision"),
            *held(66, 60, "GPU-3")]  # fmt: skip
    with Service(chosen, VirtualClock(NOW_MS)) as service:
        deliver(service.ledger, NOW_MS, batch(rows, cluster="prod", node="n1"))
        client = client_of(service, headers=PAGE)
        means, times = [], []
        of_month = "/explore?start=2026-10-01&end=2026-11-01&measure=cost"
        for path in (
            "/team/nlp?month=2026-10", "/group?by=team&value=nlp&month=2026-10", f"{of_month}&where.team=nlp&by=team",
            "/month/2026-10", "/group?by=user&value=&month=2026-10", f"{of_month}&by=team",
            "/group?by=node&value=n1&month=2026-10",
        ):  # fmt: skip
            said = re.search(r"A weekday, mean of [^<]+", client.get(path).text)
            assert said is not None, path
            means.append(re.findall(r"\d+\.\d\d(?!\d)", said[0]))
            times.append(next(iter(set(re.findall(r"for (?:held time|time held or not)", said[0]))), ""))
    # 48 and 41 GPU-hours at 2.13337
    assert means[:3] == [["102.40", "87.47"]] * 3
    assert means[5] != means[3]
    assert times == ["for held time"] * 5 + ["for time held or not"] * 2


def figure_of(client: TestClient, address: str) -> Decimal:
    """The amount of `The figure` on a page of lines, at the foot of its parts."""
    text = client.get(address).text
    return amount_of(text.partition("<h2>The figure</h2>")[2].partition("</p>")[0])


@pytest.mark.parametrize(
    ("start", "end"), [("2026-10-30", "2026-10-31"), ("2026-11-01", "2026-11-02"), ("2026-10-29", "2026-11-02")]
)
@pytest.mark.parametrize("by", ["team", "day", "job"])
def test_the_command_and_explore_have_equal_amounts_and_totals(
    client: TestClient, running: Service, run_command: CommandLine, start: str, end: str, by: str
) -> None:
    text = client.get(f"/explore?start={start}&end={end}&by={by}&columns=cost").text
    rows = next(rows for caption, (_, rows) in tables(text).items() if caption.startswith("GPU time and cost by"))
    shown = [amount_of(row[-1]) for row in rows if plain(row[-1]) != "–"]
    total = amount_of(text.partition("<tfoot>")[2].partition("</tfoot>")[0].rpartition("<td")[2])
    with serve(running.app, "127.0.0.1", 0) as url:
        printed = run_command.at(url).shown("cost", "--by", by, "--start", start, "--end", end, "--timezone", "UTC")
        document = run_command.at(url).shown("cost", "--start", start, "--end", end, "--output", "json")
    amounts = [amount_of(line) for line in printed.splitlines() if re.search(r"\d\.\d\d(?!\d)", line)]
    assert (sorted(amounts[:-1]), amounts[-1]) == (sorted(shown), total)
    assert "amount" not in document


@pytest.mark.parametrize("path", ["/", *(f"/month/{month}" for month in MONTHS), "/team/vision?month=2026-10"])
def test_every_amount_that_leads_to_lines_is_the_figure_there(client: TestClient, path: str) -> None:
    text = client.get(path).text
    links = set(re.findall(r'<a class="fig" href="([^"]+)">([^<]*)</a>', text))
    amounts = [(unescape(address), shown) for address, shown in links if re.search(r"\d\.\d\d$", shown)]
    assert amounts
    for address, shown in amounts:
        assert figure_of(client, address) == amount_of(shown), (path, address)


def test_a_span_of_two_months_has_the_sums_of_them_in_explore_and_in_its_report(client: TestClient) -> None:
    start, end = "2026-10-30", "2026-11-02"
    expected = explored(client, start, end)
    parts = [explored(client, start, "2026-11-01"), explored(client, "2026-11-01", end)]
    assert expected == {team: sum((part[team] for part in parts), Decimal(0)) for team in TEAMS}
    readers = {"html": lambda text: amounts_in(text, "Teams, the largest first", 7), "csv": in_csv, "json": in_json}
    for form in readers.keys() & exports():
        found = readers[form](client.get(f"/v1/report?start={start}&end={end}&format={form}").text)
        assert found == expected, form


def test_a_job_has_one_amount_on_its_page_in_the_list_and_in_explore(client: TestClient) -> None:
    span = "start=2026-10-01&end=2026-12-01"
    jobs = tables(client.get(f"/jobs?{span}&columns=cost").text)
    (rows,) = [rows for caption, (_, rows) in jobs.items() if caption.startswith("Jobs")]
    assert len(rows) == len(TEAMS)
    explored_jobs = amounts_in(client.get(f"/explore?{span}&by=job&columns=cost").text, "GPU time and cost by")
    for row in rows:
        address = unescape(re.findall(r'href="([^"]+)"', row[0])[0])
        own = client.get(address).text.partition("<h2>Cost")[2].partition("</p>")[0]
        name = next(name for name in explored_jobs if name and name in plain(row[0]))
        assert amount_of(own) == amount_of(row[-1]) == explored_jobs[name], address


def test_the_days_of_the_chart_add_up_to_the_rows_of_explore_and_are_those_of_home(client: TestClient) -> None:
    text = client.get(
        "/explore?start=2026-10-29&by=team&measure=cost&columns=cost&where.team=" + "&where.team=".join(TEAMS)
    ).text
    told = [unescape(one).split("\n") for one in re.findall(r"<title>([^<]*)</title>", text) if "\n" in one]
    of_team = dict.fromkeys(TEAMS, Decimal(0))
    for _, *lines in told:
        parts = {name: amount_of(rest) for name, _, rest in (line.partition(": ") for line in lines) if name in TEAMS}
        for name, amount in parts.items():
            of_team[name] += amount
        together = [amount_of(line) for line in lines if line.startswith("Together")]
        assert together in ([], [sum(parts.values())])
    rows = amounts_in(text, "GPU time and cost by")
    assert of_team == {name: rows[name] for name in TEAMS}
