"""Mail, sent to a real server: both texts and the files, refusals, an answer that does not come, TLS."""

from __future__ import annotations

import ssl

import pytest
import trustme

from accountant.channels.mail import Mail, Smtp
from accountant.channels.protocol import (
    DeliveryUncertain,
    Refused,
    one_line,
)
from accountant.notifications.subscriptions import DeliveriesFile
from gputally.base.yaml_file import FileFault, parse
from gputally.server import config_loading
from tests.channels.letter import LETTER
from tests.fakes.mailserver import mail_server


def smtp(server, **more) -> Smtp:
    plain = {"server": server.address, "from": "gputally@example.com", "to": ["a@example.com", "b@example.com"]}
    return Smtp.model_validate(plain | {"tls": "off"} | more)


def test_a_mail_has_both_texts_its_files_and_the_same_id_every_time():
    with mail_server() as server:
        told = Mail(smtp(server)).deliver(LETTER)
        Mail(smtp(server)).deliver(LETTER)
    assert told == f"accepted by {server.address} for 2 of 2"
    first, second = server.letters
    assert first["Message-ID"] == second["Message-ID"]
    assert first["Date"] == "Sun, 01 Nov 2026 12:00:00 +0000"
    assert server.envelopes[0] == ("gputally@example.com", ["a@example.com", "b@example.com"])
    assert first["Bcc"] is None, "a name in the subject is no header"
    assert first["Subject"] == one_line(LETTER.subject)
    plain, html = first.get_body(("plain",)), first.get_body(("html",))
    assert plain is not None
    assert html is not None
    assert "GPU-hours  1,234.5" in plain.get_content()
    assert "<script>" not in html.get_content()
    (file,) = first.iter_attachments()
    assert (file.get_filename(), file.get_content()) == ("gputally-2026-10.pdf", b"%PDF-1.7 \x00\xff")


def test_a_mail_that_is_turned_away_did_not_arrive():
    with mail_server() as server:
        server.busy = 1
        with pytest.raises(Refused, match="451 not now"):
            Mail(smtp(server)).deliver(LETTER)
        assert server.letters == []
    with pytest.raises(Refused, match="refused"):
        Mail(smtp(server)).deliver(LETTER)


def test_a_mail_without_an_answer_may_have_arrived():
    with mail_server() as server:
        server.silent = True
        with pytest.raises(DeliveryUncertain, match="no answer to the mail"):
            Mail(smtp(server)).deliver(LETTER)
        assert len(server.letters) == 1


def test_one_wrong_address_does_not_keep_it_from_the_others():
    with mail_server() as server:
        server.unknown = {"a@example.com"}
        told = Mail(smtp(server)).deliver(LETTER)
        assert told == f"accepted by {server.address} for 1 of 2; a@example.com: 550 no such person"
        server.unknown.add("b@example.com")
        with pytest.raises(Refused, match=r"a@example\.com: 550 no such person; b@example\.com: 550"):
            Mail(smtp(server)).deliver(LETTER)


def test_a_password_travels_only_under_tls_from_a_trusted_authority(tmp_path):
    authority, stranger = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "other.pem")
    (tmp_path / "password").write_text("s3cret\n")
    known = {"tls": "starttls", "user": "gputally", "password_file": str(tmp_path / "password")}
    with mail_server(context) as server:
        server.password = "s3cret"
        Mail(smtp(server, ca_file=str(tmp_path / "ca.pem"), **known)).deliver(LETTER)
        assert len(server.letters) == 1
        with pytest.raises(Refused, match="certificate verify failed"):
            Mail(smtp(server, ca_file=str(tmp_path / "other.pem"), **known)).deliver(LETTER)
        with pytest.raises(Refused, match="530 not in the open"):
            Mail(smtp(server)).deliver(LETTER)
        (tmp_path / "password").write_text("wrong")
        with pytest.raises(Refused, match="535") as told:
            Mail(smtp(server, ca_file=str(tmp_path / "ca.pem"), **known)).deliver(LETTER)
        assert "wrong" not in str(told.value)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("server: mail, from: a@b, to: [c@d]", "smtp.server"),
        ("server: 'mail:25', from: 'a@b', to: ['x@y, z@w']", "smtp.to.0"),
        ("server: 'mail:25', from: 'a@b', to: ['x@y'], user: me", "give both user and password_file, or neither"),
    ],
)
def test_the_settings_of_a_mail_server_are_whole(settings, fault):
    text = f"schema: 1\ndestinations:\n  one: {{smtp: {{{settings}}}}}\n"
    with pytest.raises(FileFault) as told:
        config_loading.validate(parse(text, "deliveries.yaml"), DeliveriesFile)
    assert fault in str(told.value)
