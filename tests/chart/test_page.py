"""The chart's page lists the values as they are."""

import pytest

from scripts.chart_values import CHART, PAGE, page, values


def test_the_page_is_fresh() -> None:
    current, source = PAGE.read_text("utf-8"), (CHART / "values.yaml").read_text("utf-8")
    assert page(current, source) == current, "write it anew: python -m scripts.chart_values"


def test_a_value_without_a_meaning_is_named_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"values\.yaml:4: a\.c has no meaning"):
        list(values("a:\n  # -- A meaning.\n  b: 1\n  c: 2\n"))
    assert [tuple(v) for v in values("# -- It goes | on\n# and on.\na: {x: 1}\n")] == [
        ("a", '`{"x": 1}`', "It goes | on and on.")
    ]
