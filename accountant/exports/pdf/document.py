"""Prints the HTML page of a report as PDF.

WeasyPrint is imported only when the first PDF is requested, because it needs Pango, which may be missing. It must not
fetch anything: every request for a URL is refused. Equal reports give equal bytes with equal fonts."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NoReturn

from accountant.bookkeeping.month_closing import statement_hash
from accountant.core.errors import CannotRender
from accountant.reports.html_page import render_html
from accountant.reports.report_builder import Report

_FOOTER = """
@page { @bottom-right { content: counter(page) " / " counter(pages); font: 7.5pt Inter, "DejaVu Sans", sans-serif;
  color: #5a6675; } }
.long { overflow-wrap: normal; }
"""


def render_pdf(report: Report) -> bytes:
    """A PDF document. Raises CannotRender, with a one-line message, if WeasyPrint or Pango is missing."""
    try:
        import weasyprint
    except ImportError as error:
        raise CannotRender("PDF needs WeasyPrint, which is not installed: run `pip install weasyprint`") from error
    except OSError as error:
        raise CannotRender(
            "PDF needs Pango: install libpango-1.0-0, libpangoft2-1.0-0 and libharfbuzz-subset0 (Debian), "
            "or request the format html"
        ) from error
    page = _with_break_points(render_html(report)).replace("</desc>", f"</desc><style>{_chart_style()}</style>")
    document = weasyprint.HTML(string=page, base_url="about:blank", url_fetcher=_refuse)
    identifier = statement_hash(report.statement).encode()
    written = document.write_pdf(stylesheets=[weasyprint.CSS(string=_FOOTER)], pdf_identifier=identifier)
    assert isinstance(written, bytes)
    return written


_LONGEST_WORD = 64
"""Length up to which WeasyPrint may break a word at any character. Kubernetes' labels and namespaces are shorter."""
_PART = 16
_LONG_WORD = re.compile(rf"(?:[^\s<>&]|&[#\w]+;){{{_LONGEST_WORD + 1},}}")
_CHARACTER = re.compile(r"&[#\w]+;|.", re.DOTALL)
_TEXT = re.compile(r"<svg.*?</svg>|<style.*?</style>|<title>.*?</title>|>[^<]+", re.DOTALL)


def _with_break_points(page: str) -> str:
    """The page with places at which long words may be broken. To find the narrowest column, WeasyPrint lays out the
    rest of a word again after every place where it may be broken. If these are all its characters, the time grows with
    the square of the word's length: a page of 253-character names takes half a minute."""

    def broken(word: re.Match[str]) -> str:
        characters = _CHARACTER.findall(word[0])
        parts = ("".join(characters[at : at + _PART]) for at in range(0, len(characters), _PART))
        return f'<span class="long">{"<wbr>".join(parts)}</span>'

    def text_of(found: re.Match[str]) -> str:
        return _LONG_WORD.sub(broken, found[0]) if found[0].startswith(">") else found[0]

    return _TEXT.sub(text_of, page)


@cache
def _chart_style() -> str:
    """The page's rules for charts with literal colours, because WeasyPrint treats a chart as a separate document
    without the page's rules and variables."""
    css = (resources.files("accountant.reports") / "templates" / "report.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]+)", css.partition("@media")[0]))
    rules = re.findall(
        r"(?<!\w)((?:svg )?\.(?:s\d|s-rest|a-\w+|unknown|weekend|grid|capacity|tick|end|mid) \{[^}]*\})", css
    )
    text = "\n".join(rule.removeprefix("svg ") for rule in rules)
    return re.sub(r"var\((--[\w-]+)\)", lambda match: colours[match[1]], text)


def _refuse(url: str, *_: object, **__: object) -> NoReturn:
    raise ValueError(f"a report must not load external content: {url!r}")
