"""Text from outside in every medium: it controls no terminal, no spreadsheet and no reading direction."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from accountant.channels.protocol import one_line
from gputally.base.command_output import Output, show
from gputally.base.terminal import Terminal
from gputally.base.untrusted_text import FORMULA, escaped, for_cell, for_json, for_page, for_terminal
from gputally.server import page_layout
from tests.http.page_parser import steering

ANY = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
STEERING = ("\x1b[31m", "\x9b2J", "\x07", "\r", "\x00", "\u202e", "\u2066", "\u200b", "\u2028", "\x7f", "\ue000")


@given(ANY)
def test_no_medium_passes_what_steers_it(text: str) -> None:
    for medium in (escaped, for_terminal, for_page, for_cell, for_json):
        assert steering(medium(text)) == set()
    assert not for_cell(text).startswith(FORMULA)
    assert "\n" not in for_cell(text)
    assert json.loads(for_json(json.dumps(text, ensure_ascii=False))) == text


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Mn")), max_size=40))
def test_what_people_write_stays(text: str) -> None:
    for medium in (escaped, for_terminal, for_page):
        assert medium(text) == text


@pytest.mark.parametrize("text", STEERING)
def test_a_command_prints_it_in_no_form(text: str) -> None:
    name = f"team{text}x"
    table = Table("name")
    table.add_row(name)
    forms: tuple[Output, ...] = ("table", "json", "csv")
    for form in forms:
        stream = io.StringIO()
        show(form, lambda: table, [{"name": name}], to=stream)
        assert steering(stream.getvalue()) == set(), form
        if form == "json":
            assert json.loads(stream.getvalue())[0]["name"] == name
        if form == "csv":
            [row] = csv.DictReader(io.StringIO(stream.getvalue(), newline=""))
            assert row["name"] == escaped(name)


def test_colours_of_our_own_still_reach_a_terminal() -> None:
    stream = io.StringIO()
    Terminal(file=stream, force_terminal=True, color_system="standard").print("[x]\x1b[31m", style="red")
    assert stream.getvalue().startswith("\x1b[31m[x]\\x1b[31m")


@pytest.mark.parametrize("text", STEERING)
def test_pages_charts_and_mails_show_it(text: str) -> None:
    page = page_layout.environment().from_string("<p>{{ name }}</p>{{ safe }}").render(name=f"a{text}<b>", safe="plain")
    assert page == f"<p>{escaped(f'a{text}')}&lt;b&gt;</p>plain"
    chart = page_layout.root("c", 1, 1, f"a{text}", f"b{text}")
    page_layout.text(chart, "t", 0, 0, f"c{text}")
    assert steering(page_layout.drawn(chart)) == set()
    assert steering(one_line(f"a{text}b")) == set()
