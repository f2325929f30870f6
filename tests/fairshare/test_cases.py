"""Divisions read from JSON: every fault names its case and its key."""

from __future__ import annotations

import json

import pytest

from fairshare.__main__ import parse
from gputally.base.errors import DivisionError


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
        ([], "no case in the file"),
        ([3], "case 1: expected an object, found 3"),
        ({"name": "x", "queues": []}, "case 'x': total: missing"),
        ({"name": "x", "total": True, "queues": []}, "case 'x': total: expected a number, found true"),
        ({"name": "x", "total": -1, "queues": []}, "case 'x': total: -1 is below 0"),
        ({"name": "x", "total": 1, "kValue": -1, "queues": []}, "case 'x': kValue: -1 is below 0"),
        ({"name": "x", "total": 1, "queues": {}}, "case 'x': queues: expected a list, found an object"),
        ({"name": "x", "total": 1, "queues": [], "totl": 2}, "case 'x': totl: unknown key"),
        (
            {"name": "x", "total": 1, "queues": [], "function": "guess"},
            "case 'x': function: 'guess' is none of setResourceShare, divideOverQuotaResource, hierarchy",
        ),
        ('{"name": "x", "total": NaN, "queues": []}', "case 'x': total: not a finite number"),
        ('{"name": "x", "total": 1e999, "queues": []}', "case 'x': total: not a finite number"),
        ('{"name": "x", "total": 1e300, "queues": []}', "case 'x': total: 1e+300 is beyond 1e+15"),
        (f'{{"name": "x", "total": 1{"0" * 400}, "queues": []}}', "case 'x': total: not a finite number"),
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
        (3, "queues[0]: expected an object, found 3"),
        ({"request": 1}, "queues[0]: name: expected text, found nothing"),
        (_queue(wieght=1), "queue 'q': wieght: unknown key"),
        (_queue(parent=3), "queue 'q': parent: expected text, found 3"),
        (_queue(overQuotaWeight=-1), "queue 'q': overQuotaWeight: -1 is below 0"),
        (_queue(limit=-0.5), "queue 'q': limit: -0.5 is neither -1 (unlimited) nor 0 or more"),
        (_queue(usage="much"), "queue 'q': usage: expected a number, found the text 'much'"),
        (_queue(priority=1.5), "queue 'q': priority: expected a whole number, found 1.5"),
    ],
)
def test_a_fault_of_a_queue_names_the_queue(queue: object, message: str) -> None:
    with pytest.raises(DivisionError) as refused:
        parse(json.dumps({"name": "x", "total": 1, "queues": [queue]}))
    assert str(refused.value) == f"case 'x': {message}"
