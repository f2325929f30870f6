"""Drawings of pages: no text or attribute of one changes how the page is read."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from gputally.server.page_layout import drawn, environment, rect, root, text

EVIL = "a\u202eb\u2066"


def test_every_text_and_attribute_of_a_drawing_is_printable():
    svg = root("x", 1, 1, EVIL, EVIL)
    group = ET.SubElement(svg, "g", {"aria-label": EVIL})
    ET.SubElement(group, "title").text = f"{EVIL}\nsecond line"
    text(group, "tick", 0, 0, EVIL)
    rect(group, "bar", 0, 0, 1, 1)
    found = drawn(svg)
    assert "\u202e" not in found
    assert "\u2066" not in found
    assert found.count("a\\u202eb") == 5
    assert "second line" in found


TABLE = """{% call table(caption) %}
<thead><tr>
<th class="t">Node</th><th>Held<small>GPU-h</small></th><th class="t" title="{{ name }}"><a href="/x">{{ name }} ↓</a>
</th></tr></thead>
<tbody>
{% for row in rows %}<tr><th class="wrap">{{ row }}</th>
<td>{{ row }}</td><td class="why">{{ row }}</td></tr>{% endfor %}
<tr><th>all</th><td colspan="2">{{ name }}</td></tr></tbody>
{% endcall %}"""


def test_every_cell_of_a_table_is_aligned_and_named_as_its_column():
    hostile = "<td>\"'>" + EVIL
    shown = environment().from_string(TABLE).render(caption=hostile, name=hostile, rows=["a", hostile])
    table = ET.fromstring(shown).find("table")
    assert table is not None
    assert table.findtext("caption") == "<td>\"'>a\\u202eb\\u2066"
    assert [head.get("scope") for head in table.iterfind("thead/tr/th")] == ["col"] * 3
    *rows, last = table.iterfind("tbody/tr")
    assert len(rows) == 2
    for row in rows:
        head, figure, words = row
        assert (head.tag, head.get("scope"), head.get("class")) == ("th", "row", "t wrap")
        assert (figure.get("data-label"), figure.get("class")) == ("Held, GPU-h", None)
        assert (words.get("data-label"), words.get("class")) == ("<td>\"'>a\\u202eb\\u2066", "t why")
    assert last[1].get("data-label") is None
