"""The folder of a batch system's job files passes the suite of sources of holders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent.holders import job_files
from gputally.testing.holders import Held, HolderSuite, Site
from tests.agent.holders.kept_files import INDEX, Kept


class JobFolder(Kept):
    namespace = ""

    def write(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        for gpu_uuid, mig_uuid, uid, _ in self.held:
            name = f"{INDEX[gpu_uuid]}.1" if mig_uuid else str(INDEX[gpu_uuid])
            (self.path / name).write_text(f"{uid}\n")

    def fail(self) -> None:
        shutil.rmtree(self.path)

    def mend(self) -> None:
        self.write()

    def damage(self, held: Held) -> bool:
        (file,) = (one for one in self.path.iterdir() if one.read_text().strip() == held[2])
        file.unlink()
        file.mkdir()
        return True


class TestJobFiles(HolderSuite):
    plugin = job_files.HOLDERS

    @pytest.fixture
    def site(self, tmp_path: Path) -> Site:
        return JobFolder(tmp_path / "jobs")
