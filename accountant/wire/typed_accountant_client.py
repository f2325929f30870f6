"""Sends requests to an accountant and returns its answers as pydantic models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter

from accountant.wire.policy_models import UsageWindow
from accountant.wire.usage_cost_and_job_models import CostAnswer, JobsAnswer, NodesAnswer, UsageAnswer
from gputally.base.accountant_connection import AccountantConnection, Query, Unanswered

M = TypeVar("M")
Paged = TypeVar("Paged", UsageAnswer, CostAnswer, JobsAnswer, NodesAnswer)


class AccountantClient(AccountantConnection):
    """A connection to an accountant that returns answers as models. Its methods raise Unanswered also for an answer
    that does not fit the model."""

    def ask(self, model: type[M], path: str, query: Query | None = None) -> M:
        """GETs a JSON answer as a model."""
        return self._as(model, path, self.get(path, query))

    def act(self, model: type[M], path: str, content: Mapping[str, object]) -> M:
        """POSTs JSON; returns the JSON answer as a model."""
        return self.send(model, path, json.dumps(content).encode(), "application/json")

    def send(
        self, model: type[M], path: str, body: bytes, media_type: str, query: Query | None = None, encoding: str = ""
    ) -> M:
        """POSTs a body; returns the JSON answer as a model. encoding: of the body, `gzip` or ""."""
        return self._as(model, path, self.send_body("POST", path, body, media_type, query, encoding))

    def pages(self, model: type[Paged], path: str, query: Query) -> Iterator[Paged]:
        """GETs all pages of an answer, at least one."""
        following: str | None = None
        while True:
            answer = self.ask(model, path, query if following is None else {**query, "page": following})
            yield answer
            following = answer.next_page
            if following is None:
                return

    def whole(self, model: type[Paged], path: str, query: Query, most: int | None = None) -> Paged:
        """GETs an answer with the lines of all its pages, or with its first `most` lines."""
        name = "jobs" if "jobs" in model.model_fields else "lines"
        lines: list[Any] = []
        for page in self.pages(model, path, query if most is None else {**query, "limit": str(most)}):
            lines += getattr(page, name)
            if most is not None and len(lines) >= most:
                break
        return page.model_copy(update={name: tuple(lines[:most])})

    def clock_ms(self, own_ms: int) -> int:
        """The time of the accountant's clock, up to which its windows go; a demo's ledger has a time of its own.

        own_ms: this machine's time, for callers who may not query windows (403)."""
        try:
            return self.ask(UsageWindow, "/v1/windows", {"size": "1h"}).end_ms
        except Unanswered as error:
            if error.status != 403:
                raise
            return own_ms

    def _as(self, model: type[M], path: str, body: bytes) -> M:
        try:
            return TypeAdapter(model).validate_json(body)
        except ValueError as error:
            raise Unanswered(
                f"{self.url}{path}: not the answer of an accountant of this release: "
                "check the address and the accountant's release"
            ) from error
