"""A Hive metastore on the loopback with an embedded Derby database: version 2.3, from pyspark's jars."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from tests.real.programs import SHORT_LIVED_JAVA, free_ports, running, wait_until
from tests.real.spark import HOME, java


@contextlib.contextmanager
def hive_metastore(folder: Path) -> Iterator[str]:
    """Run a metastore until the block ends. Yields its address."""
    settings = {
        "javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/metastore;create=true",
        "javax.jdo.option.ConnectionDriverName": "org.apache.derby.jdbc.EmbeddedDriver",
        "datanucleus.schema.autoCreateAll": "true",
        "datanucleus.connectionPoolingType": "HikariCP",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.warehouse.dir": f"{folder}/warehouse",
        "hive.async.log.enabled": "false",
    }
    # A metastore in test mode creates the tables of locks and then refuses the requests of clients other than its own.
    with _running(folder / "first", {**settings, "hive.in.test": "true"}) as address:
        _show_locks(address)
    with _running(folder / "second", settings) as address:
        yield address


@contextlib.contextmanager
def _running(folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    folder.mkdir()
    properties = "".join(
        f"<property><name>{name}</name><value>{escape(value)}</value></property>" for name, value in settings.items()
    )
    (folder / "hive-site.xml").write_text(f"<configuration>{properties}</configuration>")
    (port,) = free_ports(1)
    command = [
        str(java() / "bin" / "java"), *SHORT_LIVED_JAVA, "-Xmx256m",
        f"-Djava.io.tmpdir={folder}", "-cp", f"{folder}:{HOME / 'jars'}/*",
        "org.apache.hadoop.hive.metastore.HiveMetaStore", "-p", str(port),
    ]  # fmt: skip
    log = folder / "metastore.log"
    with running(command, log) as process:
        wait_until(lambda: _answers(port), "the Hive metastore", process, log)
        yield f"thrift://127.0.0.1:{port}"


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2):
        return True
    return False


def _show_locks(address: str) -> None:
    from hive_metastore.ttypes import ShowLocksRequest
    from pyiceberg.catalog.hive import HiveCatalog

    with HiveCatalog._create_hive_client({"uri": address}) as client:
        client.show_locks(ShowLocksRequest())
