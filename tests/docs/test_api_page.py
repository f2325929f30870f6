"""The page of the API says what the OpenAPI document says: every question, every parameter, every refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.reference_pages import API_PAGE, DOCUMENT, api_page, said_inside


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    return found


def test_the_page_is_fresh(document: dict[str, Any]) -> None:
    assert API_PAGE.read_text(encoding="utf-8") == api_page(document), "write it anew: make reference"


def test_nothing_of_the_document_is_left_out(document: dict[str, Any]) -> None:
    text = API_PAGE.read_text(encoding="utf-8")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"### {method.upper()} {path}\n" in text
            for parameter in operation.get("parameters", ()):
                name = parameter["name"].removeprefix("where.")
                assert f"`{name}`" in text, (path, name)
    for name in document["components"]["schemas"]:
        assert f"\n### {name}\n" in text
    types = {word for line in json.dumps(document).split("`") for word in [line] if "-" in word and word.islower()}
    assert all(f"`{name}`" in text for name in types if name.replace("-", "").isalpha())


def test_every_question_and_parameter_is_explained(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            for parameter in operation.get("parameters", ()):
                own = parameter["name"].startswith("where.")
                said = own or parameter.get("description") or said_inside(parameter["schema"])
                assert said or parameter["in"] == "path", f"{method} {path}: {parameter['name']} says nothing"
