"""A name is only text in a mail."""

from __future__ import annotations

from email.message import EmailMessage

import pytest

from accountant.channels.mail import Mail, Smtp
from accountant.channels.protocol import Message, one_line
from tests.fakes.mailserver import mail_server
from tests.http.page_parser import read
from tests.http.untrusted_names import NAMES


@pytest.fixture(scope="module")
def mails() -> dict[str, EmailMessage]:
    """A mail about each name, as its recipient reads it."""
    with mail_server() as server:
        smtp = {"server": server.address, "from": "a@example.com", "to": ["b@example.com"], "tls": "off"}
        for name in NAMES:
            about = Message(
                "report/1",
                1,
                f"Team {name} held 3",
                f"about {name}",
                ((name, name),),
                ("Open", "https://pages.example/report"),
            )
            Mail(Smtp.model_validate(smtp)).deliver(about)
    return dict(zip(NAMES, server.letters, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_mail_has_our_headers_and_escaped_html(mails: dict[str, EmailMessage], name: str) -> None:
    mail = mails[name]
    assert {key.lower() for key in mail} <= {
        "subject", "from", "to", "date", "message-id", "auto-submitted", "mime-version", "content-type",
    }  # fmt: skip
    assert mail["Subject"] == one_line(f"Team {name} held 3")
    html = mail.get_body(("html",))
    assert html is not None
    found = read(html.get_content())
    assert set(found.tags) <= {"html", "body", "h1", "p", "table", "tr", "td", "a"}
    assert all(
        (value or "").startswith("https://pages.example/") for _, key, value in found.attributes if key == "href"
    )
    assert one_line(name) in one_line(" ".join(found.texts))
