"""Messages over HTTP, sent over their real transport."""

from __future__ import annotations

import json

import pytest

from accountant.channels import protocol
from accountant.channels.protocol import (
    DeliveryUncertain,
    Message,
    Refused,
    UrlFile,
    Webhook,
)
from gputally.testing.http_receiver import HANGS_UP, http_receiver
from gputally.testing.http_server import Trickling, listening
from tests.channels.letter import LETTER
from tests.plugin_cases import plugin_cases


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

    class Answers(Trickling):
        begin = b"HTTP/1.0 %d X\r\nContent-Length: 999999999\r\n\r\n" % status

    with listening(Answers) as url:
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
