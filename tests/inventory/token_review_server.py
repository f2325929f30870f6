"""An API server that answers token and access reviews from tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gputally.base.errors import ClusterUnavailable
from tests.inventory.memory_api_server import FakeApi


class Reviewing(FakeApi):
    """Answers TokenReview from one table and SubjectAccessReview from another."""

    users: dict[str, dict[str, Any]]
    rights: set[tuple[str, str, str, str]]
    out = False

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        self._asked("POST " + path)
        if self.out:
            raise ClusterUnavailable("the API server does not answer: timed out")
        spec = body["spec"]
        if path.endswith("tokenreviews"):
            found = self.users.get(spec["token"])
            known = {} if found is None else {"audiences": spec["audiences"], **found}
            status = {"authenticated": found is not None, **known}
        else:
            asked = spec["resourceAttributes"]
            assert asked["group"] == "gputally.dev"
            status = {"allowed": (spec["user"], asked["verb"], asked["resource"], asked.get("name", "")) in self.rights}
        return json.dumps({"kind": "x", "status": status}).encode()


def account(name: str, node: str | None = "n1", namespace: str = "gputally") -> dict[str, Any]:
    extra = {"authentication.kubernetes.io/node-name": [node]} if node else {}
    username = f"system:serviceaccount:{namespace}:{name}"
    return {"user": {"username": username, "uid": "1", "groups": ["system:authenticated"], "extra": extra}}
