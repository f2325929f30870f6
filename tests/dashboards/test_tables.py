"""Tables: what their columns are shown as."""

from __future__ import annotations

from typing import Any

from dashboards.layout import Query, table


def test_a_label_is_text_also_where_it_looks_like_a_number() -> None:
    """Grafana reads a number out of a text in a column of seconds: XID 119 would be two minutes."""
    columns = {"Since the last": {"decimals": 0}}
    made: Any = table("t", "d", [("Since the last", Query("x", instant=True))], ("node", "xid"), columns, "s", "XID")
    looks = {
        override["matcher"]["options"]: {one["id"]: one["value"] for one in override["properties"]}
        for override in made.overrides
    }
    assert looks == {"Node": {"unit": "string"}, "XID": {"unit": "string"}, "Since the last": {"decimals": 0}}
