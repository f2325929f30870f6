"""Questions of platform engineers, leads and controllers, each asked with one command and by an assistant, as an admin
and as the lead of team nlp. All give the same figure, which is computed by hand."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.assistant.question_ledger import Accountant, running
from tests.assistant.questions import QUESTIONS, Question
from tests.http.conftest import bearer
from tests.plugin_cases import needs

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def accountant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accountant]:
    with running(tmp_path_factory.mktemp("questions")) as served:
        yield served


def readers(question: Question) -> tuple[str, ...]:
    return ("all", "lead") if question.lead else ("all",)


@pytest.mark.parametrize("name", QUESTIONS)
def test_one_command_answers(name: str, accountant: Accountant) -> None:
    question = QUESTIONS[name]
    for who in readers(question):
        secret = accountant.admin if who == "all" else accountant.lead
        environment = os.environ | {
            "GPUTALLY_URL": accountant.url, "GPUTALLY_TOKEN_FILE": str(secret), "COLUMNS": "220", "NO_COLOR": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "gputally", *question.command], capture_output=True, text=True, env=environment,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert any(all(text in line for text in question.printed) for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_assistant_answers(name: str, accountant: Accountant) -> None:
    question = QUESTIONS[name]
    for who in ("all", "lead"):
        answer = told(accountant.url, who, question)
        if who in readers(question):
            assert not answer.is_error, answer.content
            found = answer.structured_content
            assert {"unit", "period", "coverage", "link"} <= found.keys()
            assert any(fits(question.told, one) for one in (found, *found["rows"])), found
        else:
            assert answer.is_error or "vision" not in str(answer.structured_content["rows"])


def fits(told: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row has all these fields. Amounts and GPU-hours are exact decimal texts."""
    return all(name in row and (row[name] == value or same_amount(value, row[name])) for name, value in told.items())


def same_amount(value: Any, text: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(text, str) and Decimal(value) == Decimal(text)
    except InvalidOperation:
        return False


def told(url: str, token: str, question: Question) -> Any:
    return called(url, token, question.tool, question.arguments)


def called(url: str, token: str, tool: str, arguments: Mapping[str, Any]) -> Any:
    async def run() -> Any:
        async with (
            httpx2.AsyncClient(headers=bearer(token)) as http,
            Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
        ):
            return await client.call_tool(tool, dict(arguments))

    return asyncio.run(run())


@needs("exports.pdf")
def test_the_invoice_of_a_month_is_a_pdf(accountant: Accountant, tmp_path: Path) -> None:
    file = tmp_path / "october.pdf"
    environment = os.environ | {"GPUTALLY_URL": accountant.url, "GPUTALLY_TOKEN_FILE": str(accountant.lead)}
    subprocess.run(
        [sys.executable, "-m", "gputally", "report", "2026-10", "--team", "nlp", "--to", str(file)],
        check=True, capture_output=True, env=environment,
    )  # fmt: skip
    assert file.read_bytes().startswith(b"%PDF")


def test_a_command_says_whether_the_invoice_of_the_provider_agrees(accountant: Accountant, tmp_path: Path) -> None:
    invoice, known = tmp_path / "focus.csv", tmp_path / "instances.yaml"
    invoice.write_text(
        "BilledCost,BillingCurrency,ChargePeriodStart,PricingCategory,SkuId\n"
        "100.00,USD,2026-10-01T00:00:00Z,,gpu-node\n"
    )
    known.write_text("schema: 1\ninstances:\n  - {name: gpu-node, model: NVIDIA H100 80GB HBM3}\n")
    environment = os.environ | {
        "GPUTALLY_URL": accountant.url, "GPUTALLY_TOKEN_FILE": str(accountant.admin), "COLUMNS": "220",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "gputally", "accountant", "reconcile", "2026-10", "--invoice", str(invoice),
         "--instances", str(known)],
        check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    figures = ("gpu-node", "100.00", "90.00", "10.00")
    assert any(all(text in line for text in figures) for line in done.stdout.splitlines()), done.stdout


def test_an_assistant_says_whether_the_invoice_of_the_provider_agrees(accountant: Accountant) -> None:
    of_month = {"month": "2026-10"}
    answer = called(accountant.url, "all", "provider_invoice", of_month)
    assert not answer.is_error, answer.content
    found = answer.structured_content
    assert found["link"].endswith("/invoice/2026-10")
    agreed = {"invoice": "100", "teams": "90", "idle": "0", "unused_commitments": "0", "unmatched": "10"}
    (row,) = found["rows"]
    assert fits({"items": "gpu-node", **agreed}, row)
    assert fits(agreed, found["total"])
    assert called(accountant.url, "lead", "provider_invoice", of_month).is_error
    assert called(accountant.url, "all", "provider_invoice", {"month": "2026-11"}).is_error
