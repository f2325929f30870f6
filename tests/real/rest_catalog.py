"""A server of Iceberg's REST catalog on the loopback: the project's own test fixture, over a SQLite file.

scripts/query-engines.sh fetches the jars; the server reads folders with the Hadoop client in pyspark."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.real.object_store import ObjectStore
from tests.real.programs import SHORT_LIVED_JAVA, built, free_ports, running, wait_ready
from tests.real.spark import HOME, java

SERVER = "org.apache.iceberg.rest.RESTCatalogServer"


@dataclass(frozen=True)
class RestCatalog:
    """warehouse: the folder for new tables; the server ignores the one that a client names."""

    url: str
    warehouse: str


@contextlib.contextmanager
def rest_catalog(folder: Path, store: ObjectStore) -> Iterator[RestCatalog]:
    """Run a server until the block ends. store: the object store with the tables' files."""
    home = built("query-engines.sh")
    (port,) = free_ports(1)
    warehouse = store.bucket("rest-catalog")
    jars = [
        str(home / "rest" / "*"), str(home / "trino" / "plugin" / "iceberg" / "*"),
        *map(str, (home / "trino" / "lib").glob("*jackson-annotations*")),
        *(str(jar) for name in ("hadoop-client-*", "commons-logging-*") for jar in (HOME / "jars").glob(name)),
    ]  # fmt: skip
    properties = {
        "rest.port": str(port),
        "uri": f"jdbc:sqlite:{folder}/catalog.db",
        "jdbc.schema-version": "V1",
        "warehouse": warehouse,
        "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
        **store.iceberg,
    }
    environment = {
        f"CATALOG_{name.upper().replace('-', '__').replace('.', '_')}": properties[name] for name in properties
    }
    command = [str(java() / "bin" / "java"), *SHORT_LIVED_JAVA, "-Xmx256m", "-cp", ":".join(jars), SERVER]
    log = folder / "rest-catalog.log"
    with running(command, log, {**os.environ, **environment}) as process:
        found = RestCatalog(f"http://127.0.0.1:{port}", warehouse)
        wait_ready(f"{found.url}/v1/config", process, log)
        yield found
