"""Our own sources of holders and ways to share GPUs pass the suites that every one passes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import grpc
import pytest
import yaml

from agent.holders import job_files, kubelet, pods_file, slurm
from agent.holders.kubelet.kubelet_grpc_client import VALID_MS, Kubelet, UnaryChannel
from agent.holders.kubelet.kubernetes_source import KubernetesSource
from agent.holders.protocol import SEAM, HolderPlugin, HolderSource, Holdings
from gputally.base.clock import VirtualClock
from gputally.base.plugins import OURS, plugins
from gputally.testing.holders import GPUS, START_MS, Held, HolderSuite, JobsSuite, Site
from tests.fakes.kubelet.server import FakeKubelet

INDEX = {gpu.uuid: gpu.index for gpu in GPUS}


def test_every_plugin_of_ours_can_be_used() -> None:
    ours = {one.name: one.fault for one in plugins(SEAM, HolderPlugin) if one.package == OURS}
    assert {"kubelet", "processes"} <= ours.keys()
    assert set(ours.values()) == {""}


class Kept:
    """A fake of a file or folder, which is written anew at every change. gone: where it is while it cannot be read."""

    namespace = "vision"

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path)
        self.clock = VirtualClock(START_MS)
        self.held: list[Held] = []
        self.write()

    def write(self) -> None:
        raise NotImplementedError

    def give(self, gpu_uuid: str, mig_uuid: str) -> Held:
        self.held.append((gpu_uuid, mig_uuid, f"7{INDEX[gpu_uuid]}", self.namespace))
        self.write()
        return self.held[-1]

    def take(self, held: Held) -> None:
        self.held.remove(held)
        self.write()


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


class TestJobFiles(HolderSuite):
    plugin = job_files.HOLDERS

    @pytest.fixture
    def site(self, tmp_path: Path) -> Site:
        return JobFolder(tmp_path / "jobs")


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


class TestPodsFile(HolderSuite):
    plugin = pods_file.HOLDERS

    @pytest.fixture
    def site(self, tmp_path: Path) -> Site:
        return PodsYaml(tmp_path / "pods.yaml")


class KubeletOfSuite:
    """A kubelet whose polls the suite makes; there is no API server."""

    place = ""

    def __init__(self, fake: FakeKubelet) -> None:
        self.fake, self.clock = fake, VirtualClock(START_MS)
        self.channel = UnaryChannel(fake.path, self.clock)
        self.kubelet = Kubelet(fake.path, self.clock, self.channel)

    def give(self, gpu_uuid: str, mig_uuid: str) -> Held:
        self.fake.give("vision", f"train-{INDEX[gpu_uuid]}", {"main": {"nvidia.com/gpu": [mig_uuid or gpu_uuid]}})
        return gpu_uuid, mig_uuid, f"vision/train-{INDEX[gpu_uuid]}", "vision"

    def take(self, held: Held) -> None:
        self.fake.take(*held[2].split("/"))

    def fail(self) -> None:
        self.fake.fail = grpc.StatusCode.UNAVAILABLE

    def mend(self) -> None:
        self.fake.fail = None


class TestKubelet(HolderSuite):
    plugin = kubelet.HOLDERS

    @pytest.fixture
    def site(self, kubelet: FakeKubelet) -> Iterator[Site]:
        made = KubeletOfSuite(kubelet)
        yield made
        made.channel.close()

    def open(self, site: Site) -> HolderSource:
        assert isinstance(site, KubeletOfSuite)
        return KubernetesSource(site.kubelet, site.clock)

    def look(self, source: HolderSource, site: Site, after_ms: int = VALID_MS) -> Holdings:
        assert isinstance(site, KubeletOfSuite)
        site.clock.advance(after_ms)
        site.kubelet.poll()
        return super().look(source, site, 0)


class TestSlurm(JobsSuite):
    plugin = slurm.HOLDERS
    groups: ClassVar = {
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n": ("7", "0"),
        "4:memory:/slurm/uid_1000/job_12/step_batch/task_0\n": ("12", "batch"),
        "9:freezer:/slurm_node1/uid_1000/job_12\n": ("12", ""),
    }
    strangers = ("0::/podcast.slice/job_7\n", "0::/system.slice/my.service/slurmstepd.scope/job_7/step_0\n")
