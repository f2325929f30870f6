"""What a person who mistypes an address, a filter or an option is told: where it is, and what may be meant."""

from __future__ import annotations

import re

import pytest

from accountant.wire.usage_cost_and_job_models import BUILT_IN
from fairshare.__main__ import main as fairshare
from gputally.base.near_names import nearest
from tests.http.conftest import bearer, token_entry, token_list

PAGE = {"Accept": "text/html"}


def links(text: str) -> set[str]:
    return set(re.findall(r'href="([^"]*)"', text))


@pytest.mark.parametrize(("address", "meant"), [("/nowhere", None), ("/nods", "/nodes"), ("/act/999999", "/audit")])
def test_a_page_that_there_is_not_has_the_menu_and_what_may_be_meant(start_service, address, meant):
    _, client = start_service()
    answer = client.get(address, headers=PAGE | bearer("token-of-admin"))
    assert answer.status_code == 404
    assert {"/explore", "/jobs", "/nodes"} <= links(answer.text)
    if meant is not None:
        assert f'href="{meant}"' in answer.text.partition("<main")[2]


def test_a_stranger_learns_no_menu(start_service):
    _, client = start_service(tokens=token_list(token_entry("one", "read")))
    answer = client.get("/nowhere", headers=PAGE)
    assert answer.status_code == 404
    assert "/jobs" not in links(answer.text)


def test_a_filter_by_what_is_no_dimension_is_refused_with_all_dimensions(start_service):
    _, client = start_service()
    answer = client.get("/v1/usage?where.planet=x", headers=bearer("token-of-read"))
    assert answer.status_code == 422
    assert all(name in answer.json()["detail"] for name in BUILT_IN)


def test_known_names_are_listed_if_none_is_alike():
    known = [f"team-{number}" for number in range(23)]
    assert all(name in nearest("planet", known) for name in known)
    assert "more" in nearest("planet", [f"team-{number}" for number in range(1000)])


@pytest.mark.parametrize("typed", ["--accountant", "--acountant"])
def test_the_option_of_another_name_is_suggested(typed, capsys):
    assert fairshare(["try-weight", "a", "2", typed, "http://127.0.0.1:1"]) == 2
    told = capsys.readouterr().err
    assert "--url" in told
    assert "--output" not in told
