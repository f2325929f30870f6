"""The kubelet passes the suite of sources of holders."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from agent.holders import kubelet
from agent.holders.kubelet.kubelet_grpc_client import VALID_MS, Kubelet, UnaryChannel
from agent.holders.kubelet.kubernetes_source import KubernetesSource
from agent.holders.protocol import HolderSource, Holdings
from gputally.base.clock import VirtualClock
from gputally.testing.holders import START_MS, Held, HolderSuite, Site
from tests.agent.holders.kept_files import INDEX
from tests.fakes.kubelet.server import FakeKubelet


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

    def damage(self, held: Held) -> bool:
        """Every pod comes in one answer."""
        return False


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
