"""The OpenAPI document: complete, and true of the answers, also to generated requests. Its routes, fields and types are
in docs/contract.

Generated requests follow the document or break it somewhere; they come from a fixed seed. `-m real` generates many
more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from accountant.api.problems import PROBLEMS
from accountant.composition import Service
from agent.wire import PROBLEM
from tests.http.conftest import client_of, encoded, pod_minutes
from tests.moments import present
from tests.price_books import price_book_text


def test_every_reference_leads_somewhere(accountant):
    document = accountant().app.openapi()
    found = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert found
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= document["components"]["schemas"].keys()


def test_the_agents_language_and_every_problem_are_described(accountant):
    document = accountant().client.get("/openapi.json").json()
    post = document["paths"]["/v1/usage"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Batch")
    assert {"400", "401", "403", "409", "413", "415", "422", "429", "503"} <= set(post["responses"])
    batch = document["components"]["schemas"]["Batch"]
    assert set(batch["required"]) == {"cluster", "node", "boot_id", "epoch", "first_seq", "oldest_seq"}
    types = document["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]
    assert types == [PROBLEM + slug for slug in PROBLEMS]


DESCRIBED_AT_ONE_TIME = """
import sys
from threading import Barrier, Thread
from fastapi import FastAPI
from accountant import composition
from accountant.api import problems

together, described = Barrier(4), []
def describe():
    app = FastAPI()
    app.router.routes.extend(composition.ROUTES)
    together.wait()
    described.append(problems.document(app)["paths"])
threads = [Thread(target=describe) for _ in range(together.parties)]
sys.setswitchinterval(1e-6)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(described) == len(threads) and all(each == described[0] for each in described)
"""


def test_the_first_documents_of_a_process_are_made_by_several_threads_at_one_time():
    """In a process of its own, because FastAPI keeps what the first one makes."""
    done = subprocess.run([sys.executable, "-c", DESCRIBED_AT_ONE_TIME], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_filters_and_dimensions_are_described(accountant):
    parameters = accountant().app.openapi()["paths"]["/v1/cost"]["get"]["parameters"]
    names = {parameter["name"] for parameter in parameters}
    assert {"by", "start", "end", "timezone", "page", "limit", "where.team", "where.gpu_model"} <= names
    assert all(parameter["schema"].get("description") or parameter.get("description") for parameter in parameters)


def test_pages_for_people_are_not_part_of_the_interface(accountant):
    assert all(
        path.startswith(("/v1/", "/livez", "/leading", "/readyz", "/metrics"))
        for path in accountant().app.openapi()["paths"]
    )


if TYPE_CHECKING:  # a second to import, which only who runs these tests shall wait for
    from schemathesis import Case
    from schemathesis.schemas import APIOperation


@pytest.fixture
def service(start_service) -> Service:
    """An accountant with prices and a few booked minutes, without background tasks."""
    running, _ = start_service(prices=price_book_text(H100="2.5"))
    running.ingest.submit(encoded(pod_minutes(rows=30))).result()
    return running


def asked(service: Service, mode: str, examples: int) -> Counter[int]:
    """Call every operation `examples` times; return the number of answers by status. Fails with all faults found."""
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    kept = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]
    document = schemathesis.openapi.from_dict(service.app.openapi())
    statuses: Counter[int] = Counter()

    def ask(operation: APIOperation) -> None:
        @seed(20261101)
        @settings(
            max_examples=examples, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def one(case: Case) -> None:
            answer = case.call(app=service.app, base_url="http://127.0.0.1")
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=kept)

        one()

    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 30
    for operation in operations:
        if mode == "positive" or operation.query or operation.path_parameters or operation.body:
            ask(operation)
    return statuses


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_what_is_answered_is_what_the_document_says(service: Service, mode: str) -> None:
    statuses = asked(service, mode, 2 if mode == "positive" else 1)
    assert statuses[422] > 0
    assert mode == "negative" or statuses[200] > 30
    assert present(service.ledger).imbalance(0, 2**42).total_us == 0, "made-up requests must not unbalance the books"


@pytest.mark.real
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_what_is_answered_is_what_the_document_says_in_many_more_cases(service: Service, mode: str) -> None:
    asked(service, mode, 8)


def test_every_address_says_which_methods_it_takes(service):
    described = service.app.openapi()["paths"]
    checked = 0
    for address, path in described.items():
        taken = {method.upper() for method in path}
        concrete = address.replace("{month}", "2026-10").replace("{", "").replace("}", "")
        answer = client_of(service).request("TRACE", concrete)
        assert answer.status_code == 405, (address, answer.text)
        assert taken <= set(answer.headers["allow"].split(", ")), address
        checked += 1
    assert checked > 30


def test_the_document_says_what_needs_no_token(service):
    described = service.app.openapi()
    open_to_all = {
        address
        for address, path in described["paths"].items()
        for operation in path.values()
        if operation.get("security", described["security"]) == []
    }
    assert open_to_all == {"/leading", "/livez", "/readyz"}
    assert described["paths"]["/metrics"]["get"]["security"] == [{}, {"bearer": []}]
