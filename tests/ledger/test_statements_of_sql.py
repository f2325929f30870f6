"""SQL statements are composed of given parts and of other statements."""

from __future__ import annotations

import pytest

from accountant.storage.duckdb_engine import statement


def test_a_given_part_replaces_the_placeholder_of_its_name() -> None:
    assert statement("take_pods", table="pod_seen").startswith("DELETE FROM pod_seen WHERE uid IN")


def test_a_placeholder_without_a_part_is_the_statement_of_its_name() -> None:
    assert statement("payers") in statement("holder_origins")
    assert statement("holder_origins", payers="SELECT 1").endswith("IN (SELECT 1)\n")


def test_braces_in_a_part_are_not_replaced() -> None:
    assert "{table}" in statement("take_pods", table="{table}")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, r"sql/table.sql does not exist, and no text is given for the placeholder table"),
        ({"tables": "pod"}, r"sql/take_pods.sql has the placeholders \['table'\], given are \['tables'\]"),
        ({"table": "pod", "only": ""}, r"sql/take_pods.sql has the placeholders \['table'\], given are"),
    ],
)
def test_a_missing_or_surplus_part_is_refused(parts: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        statement("take_pods", **parts)


def test_comments_are_not_sent_to_the_engine() -> None:
    assert "--" not in statement("keep_day", source="hour")
