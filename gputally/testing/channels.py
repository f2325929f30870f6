"""The contract of channels, as tests. Derive a class from `ChannelSuite` and say how to reach a fake of the medium:

    class TestNtfy(ChannelSuite):
        plugin = CHANNEL

        @pytest.fixture
        def medium(self, tmp_path):
            with http_receiver() as server:
                (tmp_path / "url").write_text(f"{server.url}/s3cret")
                yield Medium({"url_file": str(tmp_path / "url")}, server, markup={}, secrets=("s3cret",))

A medium that reads markup says which, and where: the suite then holds that no name of a user is any.

                def text(body):
                    return [json.loads(body)["text"]]

                yield Medium(settings, server, markup={"markdown": text, "mentions": text})

`gputally.testing.http_receiver` is a fake for media that speak HTTP; any object with the attributes of `Receiver`
does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pytest
from pydantic import ValidationError

from accountant.channels.protocol import SEAM, Attachment, Channel, ChannelPlugin, DeliveryUncertain, Message, Refused
from gputally.base.plugins import usable
from gputally.testing.http_receiver import ACCEPTS, HANGS_UP, TALKS_ON, HttpReceiver

HOSTILE = (
    "<!channel> @all <script>alert(1)</script> [x](http://evil.example) <http://evil.example|y> *b*"
    "\r\nBcc: all@example.com \u202e\x00\x1b[2J"
)
"""A name as a user of the cluster may choose it."""
MARKUP: Mapping[str, Sequence[str]] = {
    "html": ("<script>",),
    "markdown": ("[x](http", " *b*"),
    "angles": ("<!channel>", "<http"),
    "mentions": ("@all",),
}
"""What must not be in a text of each kind of markup, because HOSTILE has it: a tag, a link that looks like something
else, or what calls everybody."""
MESSAGE = Message(
    key="report/2026-10/pdf/finance//*",
    at_ms=1_793_534_400_000,
    subject="GPU report 2026-10",
    text="The month is closed.",
    facts=(("GPU-hours held", "1,234.5"), ("Cost, EUR", "2,469.00")),
    link=("Open in gputally", "https://gputally.example.com/month/2026-10"),
    attachments=(Attachment("gputally-2026-10.csv", "text/csv", b"team,gpu_hours\n"),),
)
_MOST_BYTES = 1_000_000


class Receiver(Protocol):
    """A fake of the medium.

    answer: ACCEPTS, HANGS_UP, or any other number: it refuses.
    bodies: what it took, as bytes."""

    answer: int

    @property
    def bodies(self) -> Sequence[bytes]: ...


@dataclass(frozen=True)
class Medium:
    """settings: what a deliveries file says under the channel's name, so that the channel reaches `receiver`.

    markup: which kinds of MARKUP the medium reads, each with a function that returns the texts of a body in which it
        does; {} for a medium that shows every text as it is.
    secrets: texts that must appear nowhere but in what is sent.
    uncertain: whether the medium can lose the answer to a message that it took. Files, for example, cannot."""

    settings: Mapping[str, Any] | str
    receiver: Receiver
    markup: Mapping[str, Callable[[bytes], Sequence[str]]]
    secrets: tuple[str, ...] = ()
    uncertain: bool = True


class ChannelSuite:
    """The tests that every channel passes."""

    plugin: ClassVar[ChannelPlugin[Any]]

    @pytest.fixture
    def medium(self) -> Medium:
        """The fake of the medium, with settings that lead to it."""
        raise NotImplementedError("define the fixture `medium` in your class")

    def channel(self, medium: Medium) -> Channel:
        return self.plugin.open(self.plugin.settings.model_validate(medium.settings))

    def deliver(self, medium: Medium, message: Message) -> str:
        return self.channel(medium).deliver(message)

    def test_its_manifest_is_complete(self) -> None:
        plugin = self.plugin
        assert plugin.reaches, "say what a delivery reads, writes and connects to"
        assert plugin.page, "name the page about it"
        assert plugin.settings.model_config.get("extra") == "forbid", "derive the settings from Model"
        assert plugin.settings.model_config.get("frozen"), "derive the settings from Model"

    def test_it_is_found_by_its_name(self) -> None:
        assert usable(SEAM, ChannelPlugin).get(self.plugin.name) is self.plugin, "register the entry point, and install"

    def test_a_misspelt_setting_is_refused(self, medium: Medium) -> None:
        given = medium.settings if isinstance(medium.settings, Mapping) else {}
        with pytest.raises(ValidationError, match="url_fiel"):
            self.plugin.settings.model_validate({**given, "url_fiel": "x"})

    def test_a_message_arrives_with_its_figures(self, medium: Medium) -> None:
        told = self.deliver(medium, MESSAGE)
        assert told, "return a short text for the log of deliveries"
        assert len(told) < 400
        (body,) = medium.receiver.bodies
        if self.plugin.files:
            assert b"team,gpu_hours" in body
        else:
            for part in (MESSAGE.subject, MESSAGE.text, "1,234.5", "gputally.example.com/month/2026-10"):
                assert part.encode() in body

    def test_a_message_without_figures_link_and_files_arrives(self, medium: Medium) -> None:
        assert self.deliver(medium, Message("budget/1", 0, "A budget is used up", "Since yesterday"))
        assert b"A budget is used up" in medium.receiver.bodies[0]

    def test_names_of_users_are_no_markup_of_their_own_and_may_be_long(self, medium: Medium) -> None:
        evil = Message("k", 0, HOSTILE, HOSTILE, ((HOSTILE[:40], HOSTILE * 500), ("", "")), MESSAGE.link)
        assert self.deliver(medium, evil)
        (body,) = medium.receiver.bodies
        assert b"\r\nBcc:" not in body, "a subject is one line"
        assert b"\x00" not in body
        assert len(body) < _MOST_BYTES
        for kind, texts_of in medium.markup.items():
            read = "\n".join(texts_of(body))
            assert "evil" in read, f"markup[{kind!r}] returns no text with a name"
            assert [sign for sign in MARKUP[kind] if sign in read] == [], f"a name of a user is {kind}: escape it"

    def test_an_answer_is_not_read_to_its_end_whatever_it_says(self, medium: Medium) -> None:
        server = medium.receiver
        if not isinstance(server, HttpReceiver):
            return
        server.answer = TALKS_ON
        with pytest.raises((Refused, DeliveryUncertain)) as told:
            self.deliver(medium, MESSAGE)
        assert server.said_mib < 32, "read a bounded part of an answer: see `sent` in accountant.channels.protocol"
        assert len(str(told.value)) < 1_000

    def test_a_refused_message_can_be_tried_again(self, medium: Medium) -> None:
        medium.receiver.answer = 503
        with pytest.raises(Refused):
            self.deliver(medium, MESSAGE)
        assert not medium.receiver.bodies
        medium.receiver.answer = ACCEPTS
        assert self.deliver(medium, MESSAGE)
        assert len(medium.receiver.bodies) == 1

    def test_a_message_without_an_answer_may_have_arrived(self, medium: Medium) -> None:
        if not medium.uncertain:
            return
        medium.receiver.answer = HANGS_UP
        with pytest.raises(DeliveryUncertain):
            self.deliver(medium, MESSAGE)

    def test_it_tells_no_secret(
        self, medium: Medium, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        caplog.set_level(logging.WARNING)  # what libraries log below is shown by no program
        told = [self.deliver(medium, MESSAGE)]
        for answer in (503, HANGS_UP):
            medium.receiver.answer = answer
            try:
                told.append(self.deliver(medium, MESSAGE))
            except (Refused, DeliveryUncertain) as error:
                told.append(str(error))
        heard = "\n".join((*told, caplog.text, *capfd.readouterr()))
        assert [secret for secret in medium.secrets if secret in heard] == []
