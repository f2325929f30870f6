"""The chart's page lists the values as they are."""

import pytest

from scripts.reference_pages import CHART, VALUES_PAGE, chart_values, values_page


def test_the_page_is_fresh() -> None:
    current, source = VALUES_PAGE.read_text("utf-8"), (CHART / "values.yaml").read_text("utf-8")
    assert values_page(current, source) == current, "write it anew: make reference"


def test_a_value_without_a_meaning_is_named_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"values\.yaml:4: a\.c has no meaning"):
        list(chart_values("a:\n  # -- A meaning.\n  b: 1\n  c: 2\n"))
    assert [tuple(v) for v in chart_values("# -- It goes | on\n# and on.\na: {x: 1}\n")] == [
        ("a", '`{"x": 1}`', "It goes | on and on.")
    ]
