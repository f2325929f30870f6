"""An accountant that an importer's token can reach over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from accountant.composition import Service
from accountant.core.settings import Settings
from accountant.storage.duckdb_ledger import DuckLedger
from accountant.wire.typed_accountant_client import AccountantClient
from gputally.base.accountant_connection import Unanswered
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from gputally.server.tokens_and_grants import new_token
from tests.moments import present

NOW_MS = 1_791_000_000_000
"""The time of the import, some days after 2026-10-01."""


@dataclass(frozen=True)
class Books:
    ledger: DuckLedger
    url: str
    token_file: Path

    @property
    def options(self) -> list[str]:
        return ["--url", self.url, "--token-file", str(self.token_file)]

    @property
    def by_admin(self) -> Books:
        """The same options with an admin's token, because the token for `import` is bound to the cluster "default"."""
        return replace(self, token_file=self.token_file.with_name("admin"))

    def remote(self, kind: type[AccountantClient] = AccountantClient) -> AccountantClient:
        return kind(self.url, self.token_file.read_text())

    def held(self, start_ms: int, end_ms: int, cluster: str, by: str = "namespace") -> dict[str, int]:
        """Return the GPU-microseconds in the ledger."""
        lines = present(self.ledger).usage((start_ms, end_ms), ("cluster", by)).lines()  # type: ignore[arg-type]
        return {
            line.key[by]: line.accounts_gpu_us.allocated
            for line in lines
            if line.key["cluster"] == cluster and line.accounts_gpu_us.allocated
        }


class Cut(AccountantClient):
    """A connection that breaks after some batches."""

    left = 3

    def send(self, model: Any, path: str, *given: Any, **named: Any) -> Any:
        if path.endswith("/usage"):
            self.left -= 1
            if self.left < 0:
                raise Unanswered("the network is gone")
        return super().send(model, path, *given, **named)


@pytest.fixture
def clock() -> VirtualClock:
    """The accountant's clock; a module whose history lies later overrides it."""
    return VirtualClock(NOW_MS)


@pytest.fixture
def books(tmp_path: Path, clock: VirtualClock) -> Iterator[Books]:
    token, entry = new_token("laptop", ("import",), cluster="default")
    of_admin, entry_of_admin = new_token("admin", ("admin",))
    (tmp_path / "tokens.yaml").write_text(f"tokens:\n{entry}{entry_of_admin}")
    (tmp_path / "token").write_text(token)
    (tmp_path / "admin").write_text(of_admin)
    settings = Settings(
        data=tmp_path / "data", listen="127.0.0.1:0", tokens=tmp_path / "tokens.yaml", log_level="error"
    )
    with Service(settings, clock) as service, serve(service.app, settings.host, settings.port) as url:
        yield Books(service.ledger, url, tmp_path / "token")
