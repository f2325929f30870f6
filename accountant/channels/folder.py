"""Writes the files of a message into a folder, each atomically. A message without files becomes a text file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import ModelWrapValidatorHandler, model_validator

from accountant.channels.protocol import Attachment, ChannelPlugin, Message, Refused, plain
from gputally.base import atomic_file
from gputally.server.config_loading import Model


class FolderSettings(Model):
    """A folder of the accountant's machine. The file may give the path alone."""

    path: Path

    @model_validator(mode="wrap")
    @classmethod
    def _alone(cls, value: object, handler: ModelWrapValidatorHandler[FolderSettings]) -> FolderSettings:
        return handler({"path": value} if isinstance(value, (str, Path)) else value)


class Folder:
    def __init__(self, settings: FolderSettings) -> None:
        self._path = settings.path

    def deliver(self, message: Message) -> str:
        note = Attachment(f"notice-{message.digest[:12]}.txt", "text/plain", plain(message).encode())
        files = message.attachments or (note,)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            for file in files:
                atomic_file.write(self._path / file.name, file.content, 0o640)
        except OSError as error:
            raise Refused(f"{self._path}: {error.strerror or error}") from error
        return ", ".join(file.name for file in files)


CHANNEL: Final = ChannelPlugin(
    name="folder",
    settings=FolderSettings,
    open=Folder,
    files=True,
    reaches="writes into the folder",
    page="docs/delivery.md",
)
