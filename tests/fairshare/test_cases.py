"""Divisions read from JSON: every fault names its case and its key."""

from __future__ import annotations

import json

import pytest

from fairshare.__main__ import parse
from gputally.base.errors import DivisionError

LEAST, MOST = "Input should be greater than or equal to", "Input should be less than or equal to"


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
        ([3], "case 1: a case is a mapping of keys to values"),
        ({"name": "x", "queues": []}, "case 'x': total: Field required"),
        ({"name": "x", "total": True, "queues": []}, "case 'x': total: Input should be a valid number"),
        ({"name": "x", "total": -1, "queues": []}, f"case 'x': total: {LEAST} 0"),
        ({"name": "x", "total": 1, "kValue": -1, "queues": []}, f"case 'x': kValue: {LEAST} 0"),
        ({"name": "x", "total": 1, "queues": {}}, "case 'x': queues: Input should be a valid list"),
        ({"name": "x", "total": 1, "queues": [], "totl": 2}, "case 'x': totl: unknown key"),
        (
            {"name": "x", "total": 1, "queues": [], "function": "guess"},
            "case 'x': function: Input should be 'setResourceShare', 'divideOverQuotaResource' or 'hierarchy'",
        ),
        ('{"name": "x", "total": NaN, "queues": []}', "case 'x': total: Input should be a finite number"),
        ('{"name": "x", "total": 1e999, "queues": []}', "case 'x': total: Input should be a finite number"),
        ('{"name": "x", "total": 1e300, "queues": []}', f"case 'x': total: {MOST} 1000000000000000"),
        (f'{{"name": "x", "total": 1{"0" * 400}, "queues": []}}', "case 'x': total: Input should be a valid number"),
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
        (3, "queues.0: Input should be a valid dictionary or instance of CaseQueue"),
        ({"request": 1}, "queues.0.name: Field required"),
        (_queue(wieght=1), "queues.0.wieght: unknown key"),
        (_queue(parent=3), "queues.0.parent: Input should be a valid string"),
        (_queue(overQuotaWeight=-1), f"queues.0.overQuotaWeight: {LEAST} 0"),
        (_queue(limit=-0.5), "queues.0.limit: -0.5 is neither -1 (unlimited) nor 0 or more"),
        (_queue(usage="much"), "queues.0.usage: Input should be a valid number"),
        (_queue(priority=1.5), "queues.0.priority: Input should be a valid integer"),
    ],
)
def test_a_fault_of_a_queue_names_the_queue(queue: object, message: str) -> None:
    with pytest.raises(DivisionError) as refused:
        parse(json.dumps({"name": "x", "total": 1, "queues": [queue]}))
    assert str(refused.value) == f"case 'x': {message}"
