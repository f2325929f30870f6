"""Statements of SQL are composed of parts that they name."""

from __future__ import annotations

import pytest

from accountant.storage.duckdb_engine import statement


def test_a_part_stands_where_the_statement_names_it() -> None:
    assert statement("take_pods", table="pod_seen").startswith("DELETE FROM pod_seen WHERE uid IN")


def test_a_part_may_hold_braces() -> None:
    assert "{table}" in statement("take_pods", table="{table}")


@pytest.mark.parametrize("parts", [{}, {"tables": "pod"}, {"table": "pod", "only": ""}])
def test_a_statement_has_the_parts_that_it_names_and_no_others(parts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"sql/take_pods.sql has the parts \['table'\], given are"):
        statement("take_pods", **parts)


def test_comments_are_not_sent_to_the_engine() -> None:
    assert "--" not in statement("keep_day", source="hour")
