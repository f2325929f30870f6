"""The file of pods passes the suite of sources of holders."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agent.holders import pods_file
from gputally.testing.holders import Held, HolderSuite, Site
from tests.agent.holders.kept_files import Kept


class PodsYaml(Kept):
    def write(self) -> None:
        pods = [
            {
                "uid": uid, "namespace": "vision", "name": f"train-{uid}",
                "devices": [{"gpu": gpu_uuid, "mig": mig_uuid}],
            }
            for gpu_uuid, mig_uuid, uid, _ in self.held
        ]  # fmt: skip
        self.path.write_text(yaml.safe_dump({"pods": pods}))

    def fail(self) -> None:
        self.path.write_text("pods: [")

    def mend(self) -> None:
        self.write()

    def damage(self, held: Held) -> bool:
        self.path.write_text(self.path.read_text().replace(f"gpu: {held[0]}", "gpu: [8]"))
        return True


class TestPodsFile(HolderSuite):
    plugin = pods_file.HOLDERS

    @pytest.fixture
    def site(self, tmp_path: Path) -> Site:
        return PodsYaml(tmp_path / "pods.yaml")
