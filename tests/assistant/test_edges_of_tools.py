"""Every parameter of every tool at the edges of its kind: an answer, or a reason, and never a defect."""

from __future__ import annotations

import inspect
from contextlib import closing, suppress
from typing import Any

import pytest

from accountant.assistant.protocol import AssistantTool
from accountant.assistant.tools import TOOLS
from accountant.composition import Service
from accountant.wire.typed_accountant_client import AccountantClient
from gputally.base.clock import VirtualClock
from gputally.base.errors import AccountantError
from gputally.server.https_server import serve
from tests.attacks.edges import COUNTS, DURATIONS, IDS, INSTANTS, MONTHS
from tests.fakes.memory_ledger import MINUTE_MS, NOW_MS
from tests.http.conftest import settings_in
from tests.hypothesis_examples import examples
from tests.usage_records import batch, deliver, interval, pod_facts, pod_holder

pytestmark = pytest.mark.thorough
EDGES = tuple(dict.fromkeys((*INSTANTS, *DURATIONS, *MONTHS, *IDS, *COUNTS)))
VALID: dict[str, Any] = {
    "at": "2026-11-01T11:30:00Z", "node": "n1", "team": "vision", "month": "2026-11", "queue": "vision",
    "job": "prod~vision~Pod~train", "subject": "vision", "id": "prod~vision~Pod~train",
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    begin = NOW_MS - 60 * MINUTE_MS
    rows = [interval(begin, "GPU-1", pod_holder("train", "vision", "a"), span_ms=MINUTE_MS)]
    facts = [pod_facts("train", begin, namespace="vision", node="n1", uid="a", created_ms=begin)]
    with Service(settings_in(tmp_path_factory.mktemp("tools"), auth="off"), VirtualClock(NOW_MS)) as service:
        deliver(service.ledger, NOW_MS, batch(rows, facts, cluster="prod", node="n1"))
        with serve(service.app, "127.0.0.1", 0) as address:
            yield address


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_text_of_every_tool_survives_its_edges(url: str, tool: AssistantTool, logs: list[Any]) -> None:
    _, *parameters = inspect.signature(tool.ask).parameters.values()
    needed = {one.name: VALID[one.name] for one in parameters if one.default is one.empty}
    if "node" in {one.name for one in parameters}:
        needed["node"] = VALID["node"]
    with closing(AccountantClient(url, "")) as accountant:
        for one in parameters:
            if "str" not in str(one.annotation):
                continue
            for edge in EDGES[:: examples(7, 1)]:
                value = {"team": edge} if "dict" in str(one.annotation) else edge
                with suppress(AccountantError, ValueError):
                    tool.ask(accountant, **{**needed, one.name: value})
                assert not [line for line in logs if line["event"] == "request_failed"], (one.name, edge)
