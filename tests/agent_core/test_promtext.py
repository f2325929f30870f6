"""The text format: what the client library's parser reads back is what was given."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agent.metrics.metric_families import Family, Kind, TextFormat
from tests.effort import examples

KINDS: tuple[Kind, ...] = ("counter", "gauge", "untyped")
# What the format cannot carry: a line ends at any of these for some readers.
words = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")) | st.sampled_from('\n\\"{}=,# '), max_size=8)
numbers = st.floats(allow_nan=False) | st.integers(-(2**60), 2**60)
series = st.dictionaries(st.tuples(words, words), numbers, max_size=5)
TEXT = TextFormat()


@settings(max_examples=examples(20, 120), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), series), max_size=4))
def test_the_parser_reads_back_what_was_given(drawn: list[tuple[Kind, dict[tuple[str, str], float]]]) -> None:
    families = []
    for number, (kind, rows) in enumerate(drawn):
        family = Family(f"gputally_{kind}{number}" + "_total" * (kind == "counter"), "A text.", kind, ("pod", "gpu"))
        for labels, value in rows.items():
            family.add(labels, value)
        families.append(family)
    for _ in range(2):  # the second time from memory
        read = list(text_string_to_metric_families(TEXT.render(families).decode()))
        assert [(f.name, f.type) for f in read] == [
            (f.name.removesuffix("_total"), "unknown" if f.kind == "untyped" else f.kind) for f in families
        ]
        for found, family in zip(read, families, strict=True):
            assert {s.name for s in found.samples} <= {family.name}
            seen = [((s.labels["pod"], s.labels["gpu"]), s.value) for s in found.samples]
            assert seen == [(labels, float(value)) for labels, value in family.series]


def test_figures_that_are_none_have_their_own_words() -> None:
    family = Family("gputally_x", "Two\nlines and a \\.", "gauge")
    for value in (float("nan"), float("inf"), float("-inf"), True, 1234567):
        family.add((), value)
    lines = TEXT.render([family]).decode().splitlines()
    assert lines[0] == "# HELP gputally_x Two\\nlines and a \\\\."
    assert [line.split()[1] for line in lines[2:]] == ["NaN", "+Inf", "-Inf", "1.0", "1234567.0"]
