"""A folder gets whole files."""

from __future__ import annotations

import pytest

from accountant.channels.folder import Folder, FolderSettings
from accountant.channels.protocol import (
    Message,
    Refused,
)
from tests.channels.letter import LETTER


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
