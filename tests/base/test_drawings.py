"""Drawings of pages: no text or attribute of one changes how the page is read."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from gputally.server.page_layout import drawn, rect, root, text

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
