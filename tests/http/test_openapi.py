"""The published description: fresh, complete, and true of what is answered."""

from __future__ import annotations

import json
import os
from pathlib import Path

from accountant.api.problems import PROBLEMS
from agent.wire import PROBLEM

SNAPSHOT = Path(__file__).parents[2] / "docs" / "schema" / "openapi.json"


def rendered(app):
    return json.dumps(app.openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def test_the_snapshot_is_fresh(door):
    """GPUTALLY_UPDATE=1 writes it anew: a change of it is a change of the contract."""
    text = rendered(door().app)
    if os.environ.get("GPUTALLY_UPDATE"):
        SNAPSHOT.parent.mkdir(parents=True, exist_ok=True)
        SNAPSHOT.write_text(text)
    assert SNAPSHOT.read_text() == text


def test_every_reference_leads_somewhere(door):
    document = door().app.openapi()
    schemas = document["components"]["schemas"]

    def references(node):
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            for child in node.values():
                yield from references(child)
        elif isinstance(node, list):
            for child in node:
                yield from references(child)

    found = set(references(document))
    assert found
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= set(schemas)


def test_the_agents_language_and_every_problem_are_described(door):
    document = door().client.get("/openapi.json").json()
    post = document["paths"]["/v1/usage"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Batch")
    assert {"400", "401", "403", "409", "413", "415", "422", "429", "503"} <= set(post["responses"])
    batch = document["components"]["schemas"]["Batch"]
    assert set(batch["required"]) == {"cluster", "node", "boot_id", "epoch", "first_seq", "oldest_seq"}
    types = document["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]
    assert types == [PROBLEM + slug for slug in PROBLEMS]


def test_filters_and_dimensions_are_described(door):
    parameters = door().app.openapi()["paths"]["/v1/cost"]["get"]["parameters"]
    names = {parameter["name"] for parameter in parameters}
    assert {"by", "start", "end", "timezone", "page", "limit", "where.team", "where.gpu_model"} <= names
    assert all(parameter["schema"].get("description") or parameter.get("description") for parameter in parameters)


def test_pages_for_people_are_not_part_of_the_interface(door):
    assert all(
        path.startswith(("/v1/", "/livez", "/leading", "/readyz", "/metrics")) for path in door().app.openapi()["paths"]
    )
