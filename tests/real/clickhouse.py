"""ClickHouse as a reader of the lake's tables: the server at GPUTALLY_CLICKHOUSE_URL, or PyPI's chdb here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import urllib3

from tests.real.object_store import ObjectStore


def iceberg_table(location: str, store: ObjectStore | None = None) -> str:
    """Return the table function that reads the Iceberg table at `location`: a folder, or an address in `store`."""
    if store is None:
        return f"icebergLocal('{urlsplit(location).path}')"
    place = location.removeprefix("s3://")
    return f"icebergS3('{store.url}/{place}/', '{store.access_key}', '{store.secret_key}')"


def clickhouse_rows(query: str, settings: Mapping[str, str] = {}) -> list[dict[str, Any]]:
    """Return the rows of an answer. ClickHouse returns integers of 64 bits and decimals as text."""
    settings = {
        "output_format_json_quote_64bit_integers": "1", "output_format_json_quote_decimals": "1",
        "output_format_json_named_tuples_as_objects": "1", "session_timezone": "UTC", **settings,
    }  # fmt: skip
    pairs = ", ".join(f"{name} = '{value}'" for name, value in settings.items())
    text = f"{query} SETTINGS {pairs} FORMAT JSON"
    url = os.environ.get("GPUTALLY_CLICKHOUSE_URL")
    if url:
        answer = urllib3.request("POST", url, body=text.encode(), timeout=120)
        if answer.status != 200:
            raise RuntimeError(f"ClickHouse refuses {query!r}: {answer.data.decode()[:500]}")
        content = answer.data.decode()
    else:
        import chdb  # 0.5 GB of engine, which a server's user need not load

        with contextlib.chdir("/"):  # it reads no file outside the working directory
            content = str(chdb.query(text))
    rows: list[dict[str, Any]] = json.loads(content)["data"]
    return rows
