"""Provides the layout that all pages share: templates, style sheet, security headers and SVG elements.

Every page extends the template `base.html` of this package. The style sheet is that of the reports with additions for
pages. jinja2 escapes all values, because users choose the names in them. The module has no routes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from xml.etree import ElementTree as ET

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, pass_environment
from jinja2.filters import make_attrgetter
from markupsafe import Markup, escape

from gputally.base.untrusted_text import for_page


def finalize(value: object) -> object:
    """Escape the unprintable characters of a value that a template prints, such as those that change the reading
    direction. jinja2 calls this function for every such value."""
    return for_page(value) if isinstance(value, str) and not isinstance(value, Markup) else value


STYLE = "/static/style.css"
HTML = "text/html; charset=utf-8"
CSS = "text/css; charset=utf-8"
ICON_TYPE = "image/svg+xml"
ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 18 18" fill="#0072b2"><path d="M1 9h3.4v8H1z'
    b'M5.6 5H9v12H5.6zM10.2 7h3.4v10h-3.4zM14.6 1h2.6v16h-2.6z"/></svg>'
)
_CONTENT = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_OWN_SCRIPT = "; script-src 'self'; connect-src 'self'"


def headers(*, script: bool = False) -> Mapping[str, str]:
    """Return the security headers of every response. They forbid resources of other sites, frames and caching.

    script: True to let script files of this server run; inline scripts never run."""
    return {
        "Content-Security-Policy": _CONTENT + (_OWN_SCRIPT if script else ""),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def environment(*packages: str) -> Environment:
    """Return a jinja2 environment with the templates of these packages, in this order, and then of this package."""
    loaders = [PackageLoader(name) for name in (*packages, "gputally.server")]
    made = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, finalize=finalize, trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # to fold constants takes a sixth of the compilation, and these templates have few
    )  # fmt: skip
    made.filters["sum"] = _sum_of_numbers
    made.globals["table"] = table
    return made


def table(caption: str, caller: Callable[[], str], *, css: str = "", visible: bool = False, note: str = "") -> Markup:
    """Return a table of a page; every table is made by this. In a template:

        {% call table("Nodes") %}
        <thead><tr><th class="t">Node</th><th>Held<small>GPU-h</small></th></tr></thead>
        <tbody><tr><th>node-1</th><td>4.0</td></tr></tbody>
        {% endcall %}

    A head of the class `t` is of a column of text, all others are of figures. Every cell is aligned as its column, and
    has its name as `data-label`: on a narrow screen a row is a card of names and values, below its first cell.

    caption: what the table shows, also for screen readers. visible: show it above the table, with the note.
    css: classes of the table."""
    heads, mark, body = str(caller()).partition("</thead>")
    columns = [(_plain(name), _has_class(attributes, "t")) for attributes, name in _HEAD.findall(heads)]
    at = 0

    def cell(found: re.Match[str]) -> str:
        nonlocal at
        tag, attributes = found.groups()
        if tag == "tr":
            at = 0
            return found[0]
        name, of_text = columns[at] if at < len(columns) else ("", False)
        wide = _WIDE.search(attributes)
        at += int(wide[1]) if wide else 1
        if of_text and not _has_class(attributes, "t"):
            attributes = (
                attributes.replace('class="', 'class="t ', 1) if 'class="' in attributes else f'{attributes} class="t"'
            )
        if tag == "th":
            return f'<th{attributes} scope="row">'
        return f'<td{attributes} data-label="{name}">' if name and not wide else f"<td{attributes}>"

    title = escape(finalize(caption))
    shown = f"<caption><b>{title}</b>{escape(note)}" if visible else f'<caption class="quiet">{title}'
    opened = f'<table class="{css}">' if css else "<table>"
    return Markup(  # noqa: S704  the parts are escaped
        f'<div class="scroll" tabindex="0" role="group" aria-label="{title}, scrolls sideways">'
        f"{opened}{shown}</caption>"
        + _COLUMN.sub('<th scope="col"', heads) + mark + _CELL.sub(cell, body) + "</table></div>"
    )  # fmt: skip


_COLUMN = re.compile(r"<th\b")
_HEAD = re.compile(r"<th\b([^>]*)>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<(tr|td|th)\b([^>]*)>")
_TAG = re.compile(r"<[^>]*>")
_WIDE = re.compile(r'colspan="(\d+)"')


def _plain(head: str) -> str:
    """The name of a column, without the arrow of its order: for an attribute in double quotes."""
    words = " ".join(_TAG.sub("", head.replace("<small>", ", ")).split())
    return words.replace(" , ", ", ").strip(" ,↑↓").replace('"', "&quot;")


def _has_class(attributes: str, name: str) -> bool:
    found = _CLASS.search(attributes)
    return found is not None and name in found[1].split()


_CLASS = re.compile(r'class="([^"]*)"')


@pass_environment
def _sum_of_numbers(environment: Environment, rows: Iterable[object], attribute: str) -> int | float:
    """The filter `sum`: the sum of an attribute that is a count or a time.

    Raises TypeError for amounts of money. What a sum of none of them is depends on the figure (0.00, or unknown), so
    the code that knows the figure adds them up, exactly."""
    total: int | float = 0
    for value in map(make_attrgetter(environment, attribute), rows):
        if not isinstance(value, int | float):
            raise TypeError(f"a template adds up {attribute}, a {type(value).__name__}: only counts and times")
        total += value
    return total


def compile_templates(environment: Environment, package: str) -> None:
    """Compile the templates of a package, so that the first request of a page does not wait for it."""
    for name in PackageLoader(package).list_templates():
        if name.endswith(".html"):
            environment.get_template(name)


def sheet(name: str) -> str:
    """Return a style sheet of this package as text."""
    return (resources.files("gputally.server") / "static" / name).read_text(encoding="utf-8")


@cache
def stylesheet() -> str:
    """Return the style sheet of the reports with the additions for pages."""
    report = (resources.files("accountant.reports") / "templates" / "report.css").read_text(encoding="utf-8")
    return report + sheet("site.css")


def root(css: str, width: int, height: int, title: str, description: str) -> ET.Element:
    """Return the root element of an SVG drawing. css: its classes, other ones for each drawing of a page, because the
    ids of its title and description, which are for screen readers, are made of them."""
    name = css.replace(" ", "-")
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg", "class": css, "viewBox": f"0 0 {width} {height}", "role": "img",
            "aria-labelledby": f"{name}-title {name}-desc",
        },
    )  # fmt: skip
    ET.SubElement(svg, "title", {"id": f"{name}-title"}).text = title
    ET.SubElement(svg, "desc", {"id": f"{name}-desc"}).text = description
    return svg


def drawn(svg: ET.Element) -> str:
    """Return a drawing as text for a page. Unprintable characters of all its texts and attributes are escaped, as
    `finalize` does for templates, which take drawings as they are."""
    for element in svg.iter():
        element.text = for_page(element.text) if element.text is not None else None
        for name, value in element.items():
            element.set(name, for_page(value))
    return ET.tostring(svg, encoding="unicode")


def rect(parent: ET.Element, css: str, x: float, y: float, width: float, height: float) -> None:
    """Draw a rectangle of the class `css`."""
    box = {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height)}
    ET.SubElement(parent, "rect", {"class": css, **{key: f"{round(value, 2):g}" for key, value in box.items()}})


def text(parent: ET.Element, css: str, x: float, y: float, content: str) -> None:
    """Write a text of the class `css`."""
    element = ET.SubElement(parent, "text", {"class": css, "x": f"{round(x, 2):g}", "y": f"{round(y, 2):g}"})
    element.text = content
