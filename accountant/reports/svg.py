"""The few elements that every chart of ours is made of. An element tree: no name can break out of its text. Pure."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from agent.plaintext import for_page


def root(css: str, width: int, height: int, title: str, description: str) -> ET.Element:
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg", "class": css, "viewBox": f"0 0 {width} {height}", "role": "img",
            "aria-labelledby": f"{css}-title {css}-desc",
        },
    )  # fmt: skip
    ET.SubElement(svg, "title", {"id": f"{css}-title"}).text = for_page(title)
    ET.SubElement(svg, "desc", {"id": f"{css}-desc"}).text = for_page(description)
    return svg


def rect(parent: ET.Element, css: str, x: float, y: float, width: float, height: float) -> None:
    box = {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height)}
    ET.SubElement(parent, "rect", {"class": css, **{key: f"{round(value, 2):g}" for key, value in box.items()}})


def text(parent: ET.Element, css: str, x: float, y: float, said: str) -> None:
    ET.SubElement(parent, "text", {"class": css, "x": f"{round(x, 2):g}", "y": f"{round(y, 2):g}"}).text = for_page(
        said
    )
