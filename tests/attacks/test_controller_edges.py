"""Every address and form of the controller at the edges of its values: an answer, or a refusal with the place
of the fault, and never a defect."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import pytest
import yaml

from fairshare.controller.policy_file import digest
from fairshare.web.policy_form import LISTED, QUEUE, PolicyText, form_of, scalars
from fairshare.web.policy_pages import ROUTES
from tests.attacks.edges import DECIMALS, EDGES, INTEGERS, mutations
from tests.fairshare.web.controller_pages import Answer, Stage, stage
from tests.fake_scheduler import fake_scheduler as fake_scheduler
from tests.hypothesis_examples import examples

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600), pytest.mark.usefixtures("fake_scheduler")]

VALUES = tuple(
    dict.fromkeys(
        (
            *(value for values in EDGES.values() for value in values), *map(str, INTEGERS), *DECIMALS,
            "{a: b", "[" * 500, "a: &x [*x]", "- x\n- y", "1:30", ".nan", ".inf", "~", "---\na", "\ufeff", "\u2028",
        )
    )
)  # fmt: skip
"""The edges of all kinds, and texts that YAML reads in another way than they look."""
NUMBERS = ("0", "-0", "1e308", "5e-324", "9" * 19, "3650000d", "99999999999999d")
"""Edges that a single field may accept, so that the checks of the whole policy see them."""


@pytest.fixture(autouse=True)
def _quiet(logs: list[Any]) -> None:
    """Log nothing to the terminal."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return stage(tmp_path_factory.mktemp("edges"), cycles=1)


def checked(answer: Answer, sent: object) -> None:
    assert answer.status < 500, (answer.status, answer.body[:300], sent)


PARAMETERS = {
    "/shares": ("queue", "weight", "sort"), "/shares/shares.csv": ("sort",),
    "/shares/queue/": (), "/shares/preview/": (), "/shares/policy": (),
    "/shares/decisions": ("queue", "kind", "days"),
    "/shares/decision": ("id", "at"),
}  # fmt: skip
"""The parameters of each page, so that a new page needs an entry."""
VALID = {"/shares/decision": {"id": "x", "at": "1790000000000"}, "/shares": {"queue": "vision", "weight": "2"}}


@pytest.mark.parametrize("page", [route.prefix for route in ROUTES if route.method == "GET"])
def test_every_address_of_every_page_survives_its_edges(here: Stage, page: str) -> None:
    for value in VALUES[:: examples(4, 1)]:
        if page != "/shares" and page.endswith("/shares"):
            for rest in ("", "/state"):
                checked(here.get(page + quote(value, safe="") + rest), value)
        for name in PARAMETERS[page]:
            query = VALID.get(page, {})
            checked(here.get(f"{page}?{urlencode({**query, name: value})}"), (name, value))


def test_every_field_of_the_form_survives_its_edges(here: Stage) -> None:
    """Every field gets every edge, many fields at a time, and then the numbers one by one."""
    standing = form_of(PolicyText.of(here.file.read_text(), "policy.yaml"))
    whole = dict(standing.values)
    for number, row in enumerate(standing.rows):
        whole |= {f"{LISTED}.{number}.{name}": value for name, value in row.values.items()}
        whole[f"{LISTED}.{number}.at"] = str(row.at)
    fields = [each.name for each in scalars()] + [f"{LISTED}.1.{each.name}" for each in QUEUE]
    for first in range(0, len(VALUES), examples(20, 6)):
        edges = {name: VALUES[(first + 7 * at) % len(VALUES)] for at, name in enumerate(fields)}
        checked(here.post("/shares/policy/check", whole | edges), edges)
    for at, name in list(enumerate(fields))[:: examples(3, 1)]:
        for value in NUMBERS[at % examples(7, 2) :: examples(7, 2)]:
            checked(here.post("/shares/policy", whole | {name: value, "action": "review"}), (name, value))
    for value in VALUES[:: examples(20, 6)]:
        for name in ("action", f"{LISTED}.1.at", f"{LISTED}.{value}.name", f"{LISTED}.1.gone"):
            checked(here.post("/shares/policy", whole | {name: value}), (name, value))


def test_every_value_of_a_policy_in_a_form_survives_its_edges(here: Stage) -> None:
    text = here.file.read_text()
    for changed in mutations(yaml.safe_load(text))[:: examples(60, 12)]:
        checked(here.post("/shares/policy/file", {"text": yaml.safe_dump(changed, allow_unicode=True)}), changed)
    for value in VALUES[:: examples(9, 1)]:
        for route, name in (
            ("/shares/policy/preview", "days"),
            ("/shares/policy/apply", "base"),
            ("/shares/policy/file", "text"),
        ):
            form = {"text": text, "base": digest(text), "days": "0", name: value}
            checked(here.post(route, form), (route, name, value))
