"""Messages in every medium, sent over their real transport."""

from __future__ import annotations

import json
import ssl

import pytest
import trustme

from accountant.channels import protocol
from accountant.channels.folder import Folder, FolderSettings
from accountant.channels.mail import Mail, Smtp
from accountant.channels.protocol import (
    Attachment,
    DeliveryUncertain,
    Message,
    Refused,
    UrlFile,
    Webhook,
    one_line,
)
from gputally.testing.http_receiver import HANGS_UP, http_receiver
from gputally.testing.http_server import Handler, listening
from tests.fakes.mailserver import mail_server
from tests.plugin_cases import plugin_cases

EVIL = "<!channel> <script>alert(1)</script> [x](http://evil) *b*\r\nBcc: all@example.com"
LETTER = Message(
    key="report/2026-10/pdf/finance//*",
    at_ms=1_793_534_400_000,
    subject=f"GPU report of {EVIL}",
    text=f"Team {EVIL} had",
    facts=(("GPU-hours", "1,234.5"), ("Team", EVIL)),
    link=("Open in gputally", "https://gputally.example.com/month/2026-10"),
    attachments=(Attachment("gputally-2026-10.pdf", "application/pdf", b"%PDF-1.7 \x00\xff"),),
)


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


def secret(tmp_path, text) -> UrlFile:
    path = tmp_path / "url"
    path.write_text(text)
    return UrlFile(url_file=path)


CHATS = plugin_cases("channels")


def plain(message: Message) -> dict[str, str]:
    """A body as a chat would take it."""
    return {"text": message.text}


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_takes_the_letter_as_text(tmp_path, chat):
    form = CHATS[chat].body
    with http_receiver() as hook:
        assert Webhook(secret(tmp_path, f"{hook.url}/services/s3cret"), form).deliver(LETTER) == "accepted by 127.0.0.1"
    (sent,) = hook.bodies
    body = json.loads(sent)
    text = json.dumps(body)
    assert "1,234.5" in text
    assert "https://gputally.example.com/month/2026-10" in text
    assert "mrkdwn" not in text
    assert '"TextBlock"' not in text, "it would read Markdown"
    CHATS[chat].assert_takes(body)


def test_what_a_webhook_refuses_did_not_arrive_and_its_url_is_never_told(tmp_path):
    with http_receiver() as hook:
        for status in (404, 503, 302):
            hook.answer = status
            with pytest.raises(Refused, match=f"{status} not now") as told:
                Webhook(secret(tmp_path, f"{hook.url}/services/s3cret"), plain).deliver(LETTER)
            assert "s3cret" not in str(told.value)
        assert hook.bodies == []
    with pytest.raises(Refused, match="ConnectError"):
        Webhook(secret(tmp_path, f"{hook.url}/services/s3cret"), plain).deliver(LETTER)


@pytest.mark.parametrize("status", [200, 500])
def test_a_webhook_that_answers_byte_by_byte_holds_nobody(tmp_path, monkeypatch, status):
    """The status decides; the rest is not worth a wait, and has a largest size."""
    monkeypatch.setattr(protocol, "TIMEOUT_SECONDS", 0.5)

    class Trickling(Handler):
        def do_POST(self):
            self.content()
            self.trickle(b"HTTP/1.0 %d X\r\nContent-Length: 999999999\r\n\r\n" % status)

    with listening(Trickling) as url:
        hook = Webhook(secret(tmp_path, url), plain)
        if status == 200:
            assert hook.deliver(LETTER) == "accepted by 127.0.0.1"
        else:
            with pytest.raises(Refused, match="500"):
                hook.deliver(LETTER)


def test_a_webhook_that_hangs_up_may_have_it(tmp_path):
    with http_receiver() as hook:
        hook.answer = HANGS_UP
        with pytest.raises(DeliveryUncertain, match=r"127\.0\.0\.1: no answer") as told:
            Webhook(secret(tmp_path, f"{hook.url}/services/s3cret"), plain).deliver(LETTER)
        assert "s3cret" not in str(told.value)
        assert len(hook.bodies) == 1


@pytest.mark.parametrize("text", ["http://chat.example.com/x", "no url", "", "https://a\nhttps://b", "x" * 5_000])
def test_a_url_that_is_none_is_refused_without_being_told(tmp_path, text):
    with pytest.raises(Refused) as told:
        Webhook(secret(tmp_path, text), plain).deliver(LETTER)
    assert not text or text not in str(told.value)


def test_a_folder_gets_whole_files_and_a_notice_is_a_text(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert Folder(FolderSettings(path=folder)).deliver(LETTER) == "gputally-2026-10.pdf"
    assert (folder / "gputally-2026-10.pdf").read_bytes() == b"%PDF-1.7 \x00\xff"
    notice = Message("budget/1", 0, "Budget", "is used up", (("Spent", "80"),))
    name = Folder(FolderSettings(path=folder)).deliver(notice)
    assert (folder / name).read_text() == "Budget\n\nis used up\n\nSpent  80\n"
    assert len(list(folder.iterdir())) == 2, "no half-written file is left"
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"exists|Not a directory"):
        Folder(FolderSettings(path=tmp_path / "file")).deliver(LETTER)
