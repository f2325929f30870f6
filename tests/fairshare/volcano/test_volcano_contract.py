"""Volcano passes the suite of schedulers."""

from __future__ import annotations

from typing import Any

import pytest

from fairshare.schedulers.volcano import kinds as volcano_kinds
from fairshare.schedulers.volcano.plugin import SCHEDULER as VOLCANO
from gputally.kubernetes.objects import GPU
from gputally.testing.schedulers import SchedulerSite, SchedulerSuite
from tests.fairshare.builders import object_of
from tests.fairshare.volcano.objects import volcano


class TestVolcano(SchedulerSuite):
    plugin = VOLCANO

    @pytest.fixture
    def site(self) -> SchedulerSite:
        def queue(name: str) -> dict[str, Any]:
            return object_of(volcano_kinds.QUEUE, name, {"weight": 4}, {"allocated": {GPU: "4"}})

        def group(name: str) -> dict[str, Any]:
            spec = {"queue": name, "minMember": 1, "minResources": {GPU: "4"}}
            return object_of(volcano_kinds.POD_GROUP, f"g-{name}", spec, {"phase": "Pending"}, uid=name)

        return SchedulerSite(
            refs=("volcano:a", "volcano:b"),
            objects=(*map(queue, "ab"), *map(group, "ab"), volcano("proportion")),
            without_effect=lambda cluster: cluster.load([volcano("capacity")]),
            counts_history=lambda cluster: cluster.load(
                [volcano("proportion", {"name": "fairshare", "arguments": {}})]
            ),
        )
