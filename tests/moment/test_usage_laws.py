"""Every implementation keeps the laws of the relation of usage, and all of them answer alike."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.fleet.fleet_ledgers import FleetQuery
from tests.hypothesis_examples import examples
from tests.lake.comparison_queries import HOUR, SPAN
from tests.moment.conftest import Several, capacity
from tests.moment.laws import keeps_its_laws, questions, rows


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["duckdb", "lake", "memory"])
@given(data=st.data())
@settings(max_examples=examples(5, 80))
def test_usage_keeps_its_laws(several: Several, name: str, data: st.DataObject) -> None:
    known = several.of[name]
    question = data.draw(questions(*SPAN, known.step_ms, known.values))
    keeps_its_laws(known.ask, question, capacity, known.measures)


@pytest.mark.thorough
@given(data=st.data())
@settings(max_examples=examples(10, 120))
def test_all_answer_alike(several: Several, data: st.DataObject) -> None:
    """What each of them keeps, in whole hours."""
    truth = several.of["duckdb"]
    question = data.draw(questions(*SPAN, HOUR, truth.values))
    asked = {*question.by, *question.where}
    for known in several.of.values():
        if asked <= known.values.keys():
            expected = truth.moment.usage(*question, known.measures)
            assert rows(known.ask(question)) == rows(expected)
    for span, (start_ms, end_ms) in enumerate(pairwise(question.edges)):
        found = several.fleet.usage(several.members, FleetQuery(start_ms, end_ms, *question[1:]))
        assert list(found.lines) == truth.moment.usage(*question).lines(span)
