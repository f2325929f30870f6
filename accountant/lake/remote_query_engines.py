"""Runs queries on remote engines: Spark, Trino and ClickHouse.

Each reads the tables itself: Spark and Trino through a catalog configured there (`GPUTALLY_ENGINE_CATALOG`, default
`lake`), ClickHouse from the tables' folders, in the version that the lake's catalog names. Their clients are not
dependencies of gputally; if one is missing, the error says what to install."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any, Final
from urllib.parse import unquote, urlparse

import httpx2
import pyarrow as pa
from sqlglot import exp

from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake
from accountant.lake.catalog import NAMESPACE, Catalogue, described, without_password
from accountant.lake.query_engines import Bounds, Engine
from accountant.lake.tables import TABLES

CATALOG_VARIABLE: Final = "GPUTALLY_ENGINE_CATALOG"
"""Name of the Iceberg catalog in Spark or Trino; default `lake`."""
_BY_NAME: Final = {table.name: table for table in TABLES}
_PATIENCE_S: Final = 600.0


def connect(name: str, lake: Lake, url: str) -> Engine:
    """Connects to the engine of that name. Raises LakeUnavailable."""
    if name == "spark":
        return SparkEngine.connect(url)
    if name == "trino":
        return TrinoEngine.connect(url)
    return ClickHouseEngine(Catalogue.connect(lake), url)


class SparkEngine:
    """A Spark session: on a cluster (`spark://…`), by Spark Connect (`sc://…`), or in this process (`local[2]`)."""

    name = "spark"

    def __init__(self, session: Any, catalog: str) -> None:
        self._session = session
        self._catalog = catalog

    @classmethod
    def connect(cls, url: str) -> SparkEngine:
        sql = _client("pyspark.sql", "pyspark")
        builder = sql.SparkSession.builder.appName("gputally")
        try:
            if url.startswith("sc://"):
                session = builder.remote(url).getOrCreate()
            else:
                session = (builder.master(url) if url else builder).getOrCreate()
        except Exception as error:
            raise LakeUnavailable(f"spark {url}: {described(error)}") from error
        return cls(session, os.environ.get(CATALOG_VARIABLE, "lake"))

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:  # noqa: ARG002 - the question has its own bounds
        try:
            found: pa.Table = self._session.sql(_text(question, "spark", self._catalog)).toArrow()
        except Exception as error:
            raise LakeUnavailable(f"spark: {described(error)}") from error
        return found

    def close(self) -> None:
        self._session.stop()


class TrinoEngine:
    """A Trino coordinator, `http(s)://user@host:port`; with a password `https://user:password@host:port`."""

    name = "trino"

    def __init__(self, connection: Any, catalog: str) -> None:
        self._connection = connection
        self._catalog = catalog

    @classmethod
    def connect(cls, url: str) -> TrinoEngine:
        dbapi = _client("trino.dbapi", "trino")
        at = urlparse(url)
        user = unquote(at.username or "gputally")
        basic = _client("trino.auth", "trino").BasicAuthentication
        connection = dbapi.connect(
            host=at.hostname or "127.0.0.1",
            port=at.port or (443 if at.scheme == "https" else 8080),
            user=user,
            http_scheme=at.scheme or "http",
            auth=basic(user, unquote(at.password)) if at.password else None,
        )
        return cls(connection, os.environ.get(CATALOG_VARIABLE, "lake"))

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:  # noqa: ARG002 - the question has its own bounds
        try:
            cursor = self._connection.cursor()
            cursor.execute(_text(question, "trino", self._catalog))
            rows = cursor.fetchall()
            names = [column.name for column in cursor.description]
            columns = list(zip(*rows, strict=True)) or [()] * len(names)
        except Exception as error:
            raise LakeUnavailable(f"trino: {described(error)}") from error
        return pa.table(dict(zip(names, map(list, columns), strict=True)))

    def close(self) -> None:
        self._connection.close()


class ClickHouseEngine:
    """ClickHouse: a server at `http(s)://user:password@…`, or, without an address, in this process (chdb).

    It reads tables from their folders. Each question names the committed version, because a folder may hold a later one
    whose commit failed."""

    name = "clickhouse"

    def __init__(self, catalogue: Catalogue, url: str) -> None:
        self._catalogue = catalogue
        self._url = url
        self._place = f"clickhouse {without_password(url)}".rstrip()
        self._local: Any = None if url else _client("chdb", "chdb")

    def query(self, question: exp.Select, bounds: Bounds) -> pa.Table:  # noqa: ARG002 - the question has its own bounds
        asked = question.transform(self._placed)
        text = asked.sql(dialect="clickhouse") + " SETTINGS aggregate_functions_null_for_empty = 1"
        try:
            if self._local is not None:
                with contextlib.chdir("/"):  # it reads only files inside the working directory
                    content = self._local.query(text, "ArrowStream").bytes()
            else:
                answer = httpx2.post(self._url, content=text + " FORMAT ArrowStream", timeout=_PATIENCE_S)
                if answer.is_error:
                    raise OSError(f"HTTP {answer.status_code}: {answer.text}")
                content = answer.content
            found: pa.Table = pa.ipc.open_stream(content).read_all() if content else pa.table({})
        except Exception as error:
            raise LakeUnavailable(f"{self._place}: {described(error)}") from error
        return found

    def close(self) -> None:
        self._catalogue.close()

    def _placed(self, node: exp.Expression) -> exp.Expression:
        if not isinstance(node, exp.Table):
            return node
        table = self._catalogue.open(_BY_NAME[node.name])
        place = urlparse(table.location())
        version = urlparse(table.metadata_location).path.rpartition("/")[2]
        committed = exp.Var(this=f"SETTINGS iceberg_metadata_file_path = 'metadata/{version}'")
        if place.scheme in {"", "file"}:
            return exp.Table(this=exp.func("icebergLocal", exp.Literal.string(place.path), committed))
        known = table.io.properties
        if place.scheme != "s3":
            raise LakeUnavailable(
                f"clickhouse reads a lake in a folder or on S3, and {self._catalogue.place} is neither"
            )
        endpoint = known.get("s3.endpoint", "https://s3.amazonaws.com").rstrip("/")
        address = f"{endpoint}/{place.netloc}{place.path}/"
        keys = [known[name] for name in ("s3.access-key-id", "s3.secret-access-key") if name in known]
        return exp.Table(this=exp.func("icebergS3", *map(exp.Literal.string, (address, *keys)), committed))


def _text(question: exp.Select, dialect: str, catalog: str) -> str:
    def qualified(node: exp.Expression) -> exp.Expression:
        return exp.table_(node.name, db=NAMESPACE, catalog=catalog) if isinstance(node, exp.Table) else node

    return question.transform(qualified).sql(dialect=dialect)


def _client(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LakeUnavailable(f"{package} is not installed here: pip install {package}") from error
