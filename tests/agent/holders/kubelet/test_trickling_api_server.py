"""A list of the API server that does not end."""

from __future__ import annotations

import pytest

from agent.holders.kubelet import lean_list_watch
from agent.holders.kubelet.lean_list_watch import ApiServer, ApiUnavailable
from gputally.testing.http_server import Trickling, listening


def test_a_list_that_comes_byte_by_byte_ends_with_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow server would hold the thread that follows the pods for as long as it likes."""
    monkeypatch.setattr(lean_list_watch, "TIMEOUT_S", 0.5)
    with listening(Trickling) as url, pytest.raises(ApiUnavailable, match="no whole answer"):
        ApiServer(url, None, None).page("/api/v1/pods", {})
