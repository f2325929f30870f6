"""The report's page as PDF, for paper: A4, the print style of the page itself.

WeasyPrint is imported when the first page is asked for: it needs Pango, which an accountant without PDFs does not.
Nothing is fetched: whatever the page would load is refused. Equal reports give equal bytes with equal fonts.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NoReturn

from accountant.errors import CannotRender
from accountant.reports import html
from accountant.reports.model import Report

_FOOTER = """
@page { @bottom-right { content: counter(page) " / " counter(pages); font: 7.5pt Inter, "DejaVu Sans", sans-serif;
  color: #5a6675; } }
"""


def render(report: Report) -> bytes:
    """A PDF document. Raises CannotRender, in one line, where WeasyPrint or Pango is missing."""
    try:
        import weasyprint
    except ImportError as error:
        raise CannotRender("PDF needs WeasyPrint: install gputally[accountant]") from error
    except OSError as error:
        raise CannotRender(
            "PDF needs Pango: install libpango-1.0-0 and libpangoft2-1.0-0 (Debian), or ask for html"
        ) from error
    page = html.render(report).replace("</desc>", f"</desc><style>{_chart_style()}</style>")
    document = weasyprint.HTML(string=page, base_url="about:blank", url_fetcher=_refuse)
    identifier = report.statement.hash.encode()
    written = document.write_pdf(stylesheets=[weasyprint.CSS(string=_FOOTER)], pdf_identifier=identifier)
    assert isinstance(written, bytes)
    return written


@cache
def _chart_style() -> str:
    """The page's rules for charts with their colours written out: to WeasyPrint a chart is a document of its own,
    which sees neither the page's rules nor its variables."""
    css = (resources.files("accountant.reports") / "templates" / "report.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]+)", css.partition("@media")[0]))
    rules = re.findall(r"((?:svg )?\.(?:s\d|s-rest|a-\w+|grid|capacity|tick|end|mid) \{[^}]*\})", css)
    text = "\n".join(rule.removeprefix("svg ") for rule in rules)
    return re.sub(r"var\((--[\w-]+)\)", lambda found: colours[found[1]], text)


def _refuse(url: str, *_: object, **__: object) -> NoReturn:
    raise ValueError(f"a report loads nothing, and {url!r} least of all")
