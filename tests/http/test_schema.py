"""Requests made up from the OpenAPI document itself: no defect, and no answer that the document does not describe.

The document is the contract that clients are generated from, so an answer beside it is a fault of one of the two.
Requests follow the document, or break it somewhere; they are drawn from a fixed seed. `-m real` draws many more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from accountant.composition import Service
from accountant.core.settings import Settings
from tests import fresh
from tests.price_books import price_book_text

if TYPE_CHECKING:  # a second to import, which only who runs these tests shall wait for
    from schemathesis import Case
    from schemathesis.schemas import APIOperation

PRICES = price_book_text(H100="2.5")


@pytest.fixture
def service(tmp_path, clock, kit) -> Iterator[Service]:
    """With prices and a few booked minutes, and nothing else going on."""
    (tmp_path / "prices.yaml").write_text(PRICES)
    chosen = Settings(data=fresh.data(tmp_path / "data"), auth="off", linger_ms=0, prices=tmp_path / "prices.yaml")
    with Service(chosen, clock) as running:
        running.ingest.submit(kit.encoded(kit.batch(rows=30))).result()
        yield running


def asked(service: Service, mode: str, examples: int) -> Counter[int]:
    """Every operation, `examples` times; how often each status was answered. Fails with all that is wrong."""
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
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
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
    assert service.ledger.examine(0, 2**42).total_us == 0, "made-up requests must not unbalance the books"


@pytest.mark.real
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_what_is_answered_is_what_the_document_says_in_many_more_cases(service: Service, mode: str) -> None:
    asked(service, mode, 8)
