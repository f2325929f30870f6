"""Two channels for tests of deliveries that need some channel, whichever is installed: one that takes files, and one
that does not. A test installs their entry points (`gputally.channels`) under their names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accountant.channels.protocol import ChannelPlugin, Message, webhook_channel
from gputally.server.config_loading import Model


class ShelfSettings(Model):
    """path: an existing folder."""

    path: Path


class Shelf:
    """Writes the files of a message into a folder. Its text for the log is their names."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._path = settings.path

    def deliver(self, message: Message) -> str:
        for file in message.attachments:
            (self._path / file.name).write_bytes(file.content)
        return ", ".join(file.name for file in message.attachments) or message.title


SHELF: Final = ChannelPlugin("shelf", ShelfSettings, Shelf, files=True, reaches="the folder", page="nowhere")
BELL: Final = webhook_channel("bell", lambda message: {"text": message.title}, "nowhere")
"""Posts the subject to the URL in `url_file`."""
