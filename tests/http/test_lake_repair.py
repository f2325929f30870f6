"""`check --lake --repair` over HTTP and by command: for an administrator alone, with a reason, and as an act."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from accountant.composition import Service
from accountant.core.settings import Lake
from accountant.lake import tables
from accountant.lake.iceberg_catalog import Catalogue
from tests.http.conftest import TOKENS, bearer, client_of, pod_minutes, settings_in, token_entry, token_list
from tests.lake.comparison_queries import overwrite
from tests.moments import present
from tests.usage_records import running_accountant

REASON = {"reason": "a row was deleted"}


@pytest.fixture
def place(tmp_path, clock) -> Iterator[tuple[Service, str]]:
    """A running accountant, from whose lake another hand removed the usage of all days."""
    (tmp_path / "lake").mkdir()
    lake = Lake(warehouse=str(tmp_path / "lake"), ledger="prod")
    entries = token_entry("lead", "read", ", teams: [vision]") + token_entry("chief", "admin, read")
    settings = settings_in(tmp_path, lake=lake, tokens=token_list(entries))
    with running_accountant(settings, clock, pod_minutes(rows=60)) as (service, url):
        service.publish()
        found = Catalogue.connect(lake)
        overwrite(found, tables.USAGE_HOURLY, tables.USAGE_HOURLY.arrow.empty_table(), {})
        found.close()
        yield service, url


def differences(service: Service) -> list[str]:
    answer = client_of(service).get("/v1/check?lake=true", headers=bearer("chief"))
    assert answer.status_code == 200, answer.text
    found: list[str] = answer.json()["lake_differences"]
    return found


def repairs(service: Service) -> list[str]:
    return [act.who for act in present(service.ledger).acts("lake") if act.who != "accountant"]


def test_an_administrator_repairs_the_lake_over_http(place):
    service, _ = place
    client = client_of(service)
    assert differences(service)
    for headers in (bearer("lead"), bearer(TOKENS["read"]), bearer(TOKENS["policy"])):
        assert client.post("/v1/lake/repair", json=REASON, headers=headers).status_code == 403
    assert client.post("/v1/lake/repair", json=REASON).status_code == 401
    for body in ({}, {"reason": ""}, {"reason": "x" * 1_001}):
        assert client.post("/v1/lake/repair", json=body, headers=bearer("chief")).status_code == 422
    assert repairs(service) == []
    assert differences(service)
    answer = client.post("/v1/lake/repair", json=REASON, headers=bearer("chief"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["days"]
    assert differences(service) == []
    assert repairs(service) == ["chief"]
    assert present(service.ledger).acts("lake")[-1].reason == REASON["reason"]


def test_an_administrator_repairs_the_lake_by_command(place, run_command, tmp_path):
    service, url = place

    def check(token: str, *options: str) -> tuple[int, str, str]:
        file = tmp_path / f"{token}.token"
        file.write_text(token)
        file.chmod(0o600)
        return run_command.at(url)("check", "--lake", *options, "--token-file", file, "--output", "json")

    repair = "--repair", "--reason", "a row was deleted"
    code, out, _ = check("chief")
    assert code == 1
    assert json.loads(out)["lake_differences"]
    assert check("chief", "--repair")[0] == 2, "the audit trail needs a reason"
    assert check("lead", *repair)[0] == 1
    assert repairs(service) == []
    code, out, _ = check("chief", *repair)
    assert (code, json.loads(out)["lake_differences"]) == (0, [])
    assert repairs(service) == ["chief"]
    assert check("chief")[0] == 0


def test_an_accountant_without_a_lake_says_so(tmp_path, clock):
    with Service(settings_in(tmp_path), clock) as service:
        answer = client_of(service).post("/v1/lake/repair", json=REASON)
        assert answer.status_code == 422
        assert "lake.warehouse" in answer.text
