"""A stand-in for Run:ai's control plane, after its documented REST API: tokens, and units with node pools.

It has only what weights need, and does not imitate how Run:ai's scheduler divides."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs

import httpx2

CLIENT, SECRET = "gputally", "s3cret"


class StandIn:
    """The server behind `transport`. rows: the listed row of each (kind, unit id, pool id)."""

    def __init__(self, *, v2: bool = True) -> None:
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.pools: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.patches: list[tuple[str, Any]] = []
        self.answers: list[httpx2.Response] = []
        """Answers, in order, to the next requests that are not for a token."""
        self.tokens = 0
        self.lasts_s = 3600
        self.revoked = False
        self._v2 = v2
        self._ids: dict[tuple[str, str], str] = {}
        self.transport = httpx2.MockTransport(self._handle)

    def unit(self, kind: str, name: str, weight: float | None, *, pool: str = "default", **quota: float) -> None:
        """Add a project or department with a weight in a node pool. quota: allocated and requested GPUs."""
        ident = self._ids.setdefault((kind, name), f"{4_500_000 + len(self._ids)}")
        self.pools.setdefault(pool, {"id": f"pool-{pool}", "name": pool, "schedulingConfiguration": {}})
        status = {key: {"gpu": amount} for key, amount in quota.items()}
        gpu = {"deserved": 8, "limit": None, "overQuotaWeight": weight}
        self.rows[kind, ident, f"pool-{pool}"] = {
            "id": "x", "orgUnitId": ident, "orgUnitName": name, "clusterId": "c1", "nodePoolId": f"pool-{pool}",
            "nodePoolName": pool, "rank": "MediumLow", "resources": {"gpu": gpu}, "quotaStatus": status,
        }  # fmt: skip

    def set(self, kind: str, name: str, weight: float, pool: str = "default") -> None:
        """Change a weight, as an administrator does in Run:ai's pages."""
        self._gpu(kind, name, pool)["overQuotaWeight"] = weight

    def weight(self, kind: str, name: str, pool: str = "default") -> float | None:
        found: float | None = self._gpu(kind, name, pool)["overQuotaWeight"]
        return found

    def _gpu(self, kind: str, name: str, pool: str) -> dict[str, Any]:
        row = next(
            row for (k, _, p), row in self.rows.items() if (k, p, row["orgUnitName"]) == (kind, f"pool-{pool}", name)
        )
        gpu: dict[str, Any] = row["resources"]["gpu"]
        return gpu

    def _handle(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        self.asked.append((request.method, path))
        if path.endswith("/token"):
            return self._token(path, request)
        if self.answers:
            return self.answers.pop(0)
        if request.headers.get("Authorization") != f"Bearer t{self.tokens}" or self.revoked:
            self.revoked = False
            return _answer(401, {"code": 401, "message": "the token is not valid"})
        query = parse_qs(request.url.query.decode())
        match path.split("/")[3:]:
            case ["node-pools"]:
                return _answer(200, {"nodepools": list(self.pools.values())})
            case ["org-unit", kind, "node-pool-resources"]:
                limit, offset = int(query["limit"][0]), int(query["offset"][0])
                found = [row for (k, _, _), row in sorted(self.rows.items()) if k == kind]
                wanted = query.get("filterBy", [""])[0].partition("==")[2]
                found = [row for row in found if not wanted or row["clusterId"] == wanted]
                name = "resources" if kind == "projects" else "nodePoolResources"
                return _answer(200, {name: found[offset : offset + limit]})
            case ["org-unit", kind, unit]:
                return self._one(kind, unit)
            case ["org-unit", kind, unit, "resources"]:
                return self._patch(kind, unit, json.loads(request.content))
        return _answer(404, {"code": 404, "message": "no such path"})

    def _token(self, path: str, request: httpx2.Request) -> httpx2.Response:
        if path == "/api/v2/token" and not self._v2:
            return _answer(404, {"code": 404, "message": "no such path"})
        if path == "/api/v2/token":
            form = {key: values[0] for key, values in parse_qs(request.content.decode()).items()}
            given = (form.get("grant_type"), form.get("client_id"), form.get("client_secret"))
        else:
            body = json.loads(request.content)
            given = (body.get("grantType"), body.get("clientId"), body.get("clientSecret"))
        if given != ("client_credentials", CLIENT, SECRET):
            return _answer(401, {"code": 401, "message": "unknown client"})
        self.tokens += 1
        names = ("access_token", "expires_in") if path == "/api/v2/token" else ("accessToken", "expiresIn")
        return _answer(200, {names[0]: f"t{self.tokens}", names[1]: self.lasts_s})

    def _one(self, kind: str, unit: str) -> httpx2.Response:
        rows = [row for (k, u, _), row in sorted(self.rows.items()) if (k, u) == (kind, unit)]
        if not rows:
            return _answer(404, {"code": 404, "message": "no such unit"})
        resources = [
            {"nodePool": {"id": row["nodePoolId"], "name": row["nodePoolName"]}, **row["resources"]} for row in rows
        ]
        return _answer(200, {"id": unit, "name": rows[0]["orgUnitName"], "resources": resources})

    def _patch(self, kind: str, unit: str, body: Any) -> httpx2.Response:
        self.patches.append((unit, body))
        for each in body:
            row = self.rows[kind, unit, each["nodePool"]["id"]]
            row["resources"]["gpu"].update(each["gpu"])
        return _answer(200, body)


def _answer(status: int, body: object) -> httpx2.Response:
    return httpx2.Response(status, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
