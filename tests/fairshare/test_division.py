"""The division against KAI's results, its explanation, its input, and the command `divide`."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from fairshare.__main__ import main
from fairshare.cli.division_cases import parse
from fairshare.core.queues_and_weights import DivisionProblem, DivisionRound, QueueClaim, Remainder
from fairshare.explain.plan_tables import division_table
from fairshare.laws.division import divide
from gputally.base.errors import DivisionError
from tests.fairshare.conftest import Capsys, Make

TOLERANCE = 1e-9


def _equal(expected: dict[str, float], shares: dict[str, float]) -> bool:
    return expected.keys() == shares.keys() and all(abs(expected[q] - shares[q]) <= TOLERANCE for q in expected)


def _check(text: str, count: int) -> None:
    vectors = json.loads(text)["vectors"]
    cases = parse(text)
    assert len(vectors) == len(cases) == count
    wrong = []
    for vector, case in zip(vectors, cases, strict=True):
        division = divide(case, as_source=True)
        accepted = [vector["expected"], *vector.get("alternatives", [])]
        if not any(_equal(each, dict(division.shares)) for each in accepted):
            wrong.append((case.name, vector["expected"], division.shares))
        if abs(division.remaining - vector["expectedRemaining"]) > TOLERANCE:
            wrong.append((case.name, vector["expectedRemaining"], division.remaining))
    assert wrong == []


@pytest.mark.parametrize(("vectors", "count"), [("golden_text", 275), ("upstream_text", 95)])
def test_equals_the_scheduler(vectors: str, count: int, request: pytest.FixtureRequest) -> None:
    """On scenarios of this project, and on KAI's own test tables."""
    _check(request.getfixturevalue(vectors), count)


def test_an_explanation_changes_nothing_and_accounts_for_every_unit(golden_text: str) -> None:
    for case in parse(golden_text):
        explained = divide(case, explain=True, as_source=True)
        assert explained.shares == divide(case, as_source=True).shares
        given = dict(explained.deserved) or {claim.name: claim.initial for claim in case.claims}
        for step in explained.steps:
            if isinstance(step, DivisionRound):
                for offer in step.offers:
                    given[offer.queue] += offer.given
            else:
                given[step.queue] += step.given
        assert given == pytest.approx(dict(explained.shares), abs=1e-9)


def test_a_round_shows_its_numbers() -> None:
    claims = (QueueClaim("heavy", 100, usage=0.6), QueueClaim("light", 100, usage=0.1))
    division = divide(DivisionProblem("two", 15, 1.0, claims), explain=True)
    (first, remainder) = division.steps
    assert isinstance(first, DivisionRound)
    assert (first.pool, first.sum_p) == (15, pytest.approx(1.3))
    heavy, light = first.offers
    assert (heavy.n, heavy.usage, heavy.p) == (0.5, 0.6, pytest.approx(0.4))
    assert heavy.offered == pytest.approx(15 * 0.4 / 1.3)
    assert (heavy.given, light.given) == (4, 10)
    assert isinstance(remainder, Remainder)
    assert (remainder.queue, remainder.given) == ("heavy", 1)
    assert dict(division.shares) == {"heavy": 5, "light": 10}


SPENT = (QueueClaim("a", 10, usage=1.0), QueueClaim("b", 10, usage=1.0))
HEAVY = (QueueClaim("a", 10, usage=2.0, weight=3.0), QueueClaim("b", 10, usage=2.0))
ODD = (QueueClaim("a", 9, priority=2), QueueClaim("b", 9, priority=2), QueueClaim("late", 9, priority=1))


@pytest.mark.parametrize(
    ("pool", "k", "claims", "kai", "ours"),
    [
        (1, 0.0, (QueueClaim("a", 0.7), QueueClaim("b", 0.7)), {"a": 1.0, "b": 0.0}, {"a": 0.7, "b": 0.3}),
        (8, 1.0, SPENT, {"a": 0, "b": 0}, {"a": 4, "b": 4}),
        (8, 1.0, HEAVY, {"a": 0, "b": 0}, {"a": 6, "b": 2}),
        (9, 0.0, ODD, {"a": 4, "b": 4, "late": 1}, {"a": 5, "b": 4, "late": 0}),
    ],
    ids=["no more than requested", "usage zeroes every P", "then by weight", "a priority is served to the end"],
)
def test_where_the_division_departs_from_kai(
    pool: float, k: float, claims: tuple[QueueClaim, ...], kai: dict[str, float], ours: dict[str, float]
) -> None:
    case = DivisionProblem("case", pool, k, claims)
    compatible, by_default = divide(case, as_source=True), divide(case)
    assert (dict(compatible.shares), dict(by_default.shares)) == (kai, pytest.approx(ours))
    assert compatible.remaining == pool - sum(kai.values())
    assert by_default.remaining == pytest.approx(0.0)


def test_weightless_queues_with_negative_usage_count_in_the_sum_alone() -> None:
    claims = (QueueClaim("a", 10, weight=1.0), QueueClaim("b", 10, weight=0.0, usage=-2.0))
    division = divide(DivisionProblem("phantom", 4, 1.0, claims), explain=True, as_source=True)
    assert isinstance(division.steps[0], DivisionRound)
    assert division.steps[0].sum_p == 4.0
    assert division.shares["b"] == 0.0


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ((QueueClaim("a", 1), QueueClaim("a", 2)), "queue 'a' occurs twice"),
        ((QueueClaim("a", 1, parent="x"),), "queue 'a' has the unknown parent 'x'"),
        ((QueueClaim("a", 1, parent="b"), QueueClaim("b", 1, parent="a")), "the queue tree has a cycle: a -> b -> a"),
        ((QueueClaim("a", 1, parent="a"),), "the queue tree has a cycle: a -> a"),
    ],
)
def test_an_impossible_tree_is_refused(claims: tuple[QueueClaim, ...], message: str) -> None:
    with pytest.raises(DivisionError) as refused:
        divide(DivisionProblem("bad", 4, 0.0, claims))
    assert str(refused.value) == message


def test_names_deep_in_a_tree_are_still_to_be_read() -> None:
    claims = [QueueClaim(f"q{depth:02}", 10, parent=f"q{depth - 1:02}" if depth else None) for depth in range(50)]
    case = DivisionProblem("deep", 10, 0.0, tuple(claims))
    printed = StringIO()
    Console(width=120, file=printed).print(division_table(case, divide(case)))
    assert "q49" in printed.getvalue()


LEAST, MOST = "must be at least", "must be at most"


def _queue(**keys: object) -> dict[str, object]:
    return {"name": "q", "request": 1, **keys}


def test_one_case_a_list_and_a_file_of_vectors() -> None:
    case = {"total": 4, "queues": [_queue()]}
    for document in (case, [case], {"meta": {}, "vectors": [case]}):
        (parsed,) = parse(json.dumps(document))
        assert (parsed.name, parsed.total, parsed.k, parsed.function) == ("case 1", 4.0, 0.0, "hierarchy")
        (claim,) = parsed.claims
        assert (claim.limit, claim.weight, claim.priority, claim.parent) == (-1.0, 1.0, 100, None)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[", "not JSON: Expecting value: line 1 column 2 (char 1)"),
        ([], "it contains no case: a case has the keys total and queues"),
        ([3], "case 1: it is not a JSON object with the keys total and queues"),
        ({"queues": []}, "case 1: total: is missing"),
        ({"name": "x", "queues": []}, "case 'x': total: is missing"),
        ({"name": "x", "total": True, "queues": []}, "case 'x': total: must be a number"),
        ({"name": "x", "total": -1, "queues": []}, f"case 'x': total: {LEAST} 0"),
        ({"name": "x", "total": 1, "kValue": -1, "queues": []}, f"case 'x': kValue: {LEAST} 0"),
        ({"name": "x", "total": 1, "queues": {}}, "case 'x': queues: must be a list"),
        ({"name": "x", "total": 1, "queues": [], "totl": 2}, "case 'x': totl: unknown key"),
        (
            {"name": "x", "total": 1, "queues": [], "function": "guess"},
            "case 'x': function: give 'setResourceShare', 'divideOverQuotaResource' or 'hierarchy'",
        ),
        ('{"name": "x", "total": NaN, "queues": []}', "case 'x': total: must be a finite number"),
        ('{"name": "x", "total": 1e999, "queues": []}', "case 'x': total: must be a finite number"),
        ('{"name": "x", "total": 1e300, "queues": []}', f"case 'x': total: {MOST} 1e+15"),
        (f'{{"name": "x", "total": 1{"0" * 400}, "queues": []}}', "case 'x': total: must be a number"),
    ],
)  # fmt: skip
def test_a_fault_names_case_and_key(document: object, message: str) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(DivisionError) as refused:
        parse(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (3, "queues.0: must be a mapping"),
        ({"request": 1}, "queues.0.name: is missing"),
        (_queue(wieght=1), "queues.0.wieght: unknown key"),
        (_queue(parent=3), "queues.0.parent: must be a text"),
        (_queue(overQuotaWeight=-1), f"queues.0.overQuotaWeight: {LEAST} 0"),
        (_queue(limit=-0.5), "queues.0.limit: -0.5 is neither -1 (unlimited) nor 0 or more"),
        (_queue(usage="much"), "queues.0.usage: must be a number"),
        (_queue(priority=1.5), "queues.0.priority: must be a whole number"),
    ],
)
def test_a_fault_of_a_queue_names_the_queue(queue: object, message: str) -> None:
    with pytest.raises(DivisionError) as refused:
        parse(json.dumps({"name": "x", "total": 1, "queues": [queue]}))
    assert str(refused.value) == f"case 'x': {message}"


TWO = {
    "name": "two", "total": 15, "kValue": 1,
    "queues": [{"name": "heavy", "request": 100, "usage": 0.6}, {"name": "light", "request": 100, "usage": 0.1}],
}  # fmt: skip


@pytest.fixture
def divided(file: Make, capsys: Capsys) -> Make:
    """Return the command's output for these cases."""

    def run(cases: object, *options: str) -> str:
        assert main(["divide", "--input", str(file(json.dumps(cases))), *options]) == 0
        return capsys.readouterr().out

    return run


def test_divide_prints_the_shares_as_json(divided: Make) -> None:
    answer = {"name": "two", "shares": {"heavy": 5.0, "light": 10.0}, "remaining": 0.0}
    assert json.loads(divided([TWO, TWO], "--output", "json")) == [answer, answer]


def test_divide_computes_in_kais_order(divided: Make) -> None:
    """The smallest case in which exact sums and KAI's program differ: 0.3, 15.6, 0, 0.1, 0."""
    asked, deserved, weights = (0.3, 100.0, 0.3, 2.0, 1.0), (0.0, 0.7, 0.0, 0.1, 0.0), (1, 1, 2, 3, 1)
    queues = [
        {"name": f"q{i}", "request": request, "deserved": quota, "overQuotaWeight": weight, "priority": priority}
        for i, (request, quota, weight, priority) in enumerate(
            zip(asked, deserved, weights, (100, 100, 1, 1, 1), strict=True)
        )
    ]
    case = {"name": "boundary", "total": 16, "kValue": 0, "queues": queues}
    (answer,) = json.loads(divided([case], "--output", "json"))
    assert list(answer["shares"].values()) == pytest.approx([0.3, 15.3, 0.3, 0.1, 0.0], abs=1e-9)


def test_divide_explains_in_json(divided: Make) -> None:
    (answer,) = json.loads(divided(TWO, "--output", "json", "--explain"))
    (first,) = answer["rounds"]
    assert (first["pool"], first["S"], first["remaining"]) == (15.0, pytest.approx(1.3), 1.0)
    assert [queue["queue"] for queue in first["queues"]] == ["heavy", "light"]
    assert answer["remainders"][0]["queue"] == "heavy"


def test_divide_prints_tables_with_totals_and_words_for_what_the_law_reads(divided: Make) -> None:
    lines = [line.split() for line in divided(TWO, "--explain").splitlines() if line.strip(" ─")]
    assert lines[0][:3] == ["two", "15", "GPU,"]
    assert lines[2:6] == [
        ["heavy", "100", "0", "1", "60.0%", "100", "unlimited", "5", "33.3%"],
        ["light", "100", "0", "1", "10.0%", "100", "unlimited", "10", "66.7%"],
        ["given", "15", "100.0%"],
        ["left", "over", "0"],
    ]
    heads = ["queue", "fair", "share", "used", "with", "history", "offered", "given", "rest"]
    at = lines.index(heads)
    assert lines[at + 1 : at + 3] == [
        ["heavy", "50.0%", "60.0%", "40.0%", "4.615385", "4", "0.615385"],
        ["light", "50.0%", "10.0%", "90.0%", "10.384615", "10", "0.384615"],
    ]
    assert ["roots,", "priority", "100", "heavy", "1", "0.615385"] in lines


def test_divide_reads_stdin() -> None:
    command = [sys.executable, "-m", "fairshare", "divide", "--input", "-", "--output", "json"]
    done = subprocess.run(command, input=json.dumps(TWO), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0]["shares"] == {"heavy": 5.0, "light": 10.0}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"name": "x", "total": 1, "queues": [{"name": "q"}]}', "case 'x': queues.0.request: is missing"),
        (
            '{"total": 1, "queues": [{"name": "q", "request": 1, "parent": "r"}]}',
            "queue 'q' has the unknown parent 'r'",
        ),
    ],
    ids=["syntax", "missing", "parent"],
)
def test_divide_answers_faults_with_one_line(text: str, line: str, file: Make, capsys: Capsys) -> None:
    path = file(text)
    assert main(["divide", "--input", str(path)]) == 1
    assert capsys.readouterr().err == f"gputally fairshare: {path}: {line}\n"


def test_names_are_shown_as_they_are(divided: Make) -> None:
    """Text that rich takes for markup or an emoji can be a queue's name."""
    names = ["[/b]", "[red]a", "größe :warning:"]
    queues = [{"name": name, "request": 4} for name in names]
    out = divided({"total": 8, "queues": queues}, "--explain")
    assert [name for name in names if f" {name} " not in out] == []


@pytest.mark.parametrize("gang", ["a=²", "a=0", "b=1", "a", "a=1e3", f"a={10**30}"])
def test_a_faulty_gang_is_one_line(gang: str, file: Make, capsys: Capsys) -> None:
    path = file("queues: [{name: a, refs: [fake:a]}]\n")
    assert main(["check", str(path), "--capacity", "8", "--gang", gang]) == 1
    words = f"gputally fairshare: --gang {gang}: write QUEUE=GPUS, a queue of the policy and a whole number of GPUs\n"
    assert capsys.readouterr().err == words
