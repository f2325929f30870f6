"""A Spark standalone cluster on the loopback, with master and workers as processes, and a session that reads Iceberg
tables.

Spark is PyPI's pyspark on the machine's Java 17 or 21; scripts/query-engines.sh fetches the jars."""

from __future__ import annotations

import contextlib
import os
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from tests.real.programs import SHORT_LIVED_JAVA, built, free_ports, running, wait_ready, wait_until

HOME = Path(pyspark.__file__).parent


@dataclass(frozen=True)
class SparkCluster:
    """master: the cluster's address, `spark://…`."""

    master: str
    workers: int
    session: SparkSession

    def add_catalog(self, name: str, uri: str, warehouse: str, properties: Mapping[str, str] = {}) -> None:
        """Add a catalog under this name. uri: the JDBC address of PyIceberg's SQL catalog of the same name, because
        Iceberg uses the name as its key; with `type: rest` among the properties, the server's address."""
        for key, value in catalog_settings(name, uri, warehouse, properties).items():
            self.session.conf.set(key, value)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of an answer."""
        with warnings.catch_warnings():
            # PySpark leaves the socket that it collects from to the garbage collector.
            warnings.simplefilter("ignore", ResourceWarning)
            return [tuple(row) for row in self.session.sql(query).collect()]


def catalog_settings(name: str, uri: str, warehouse: str, properties: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the settings that SparkCluster.add_catalog applies."""
    prefix = f"spark.sql.catalog.{name}"
    settings = {"type": "jdbc", "uri": uri, "warehouse": warehouse, "jdbc.schema-version": "V1", **properties}
    if warehouse.startswith("s3://"):
        settings["io-impl"] = "org.apache.iceberg.aws.s3.S3FileIO"
    own = {f"{prefix}.{key}": value for key, value in settings.items()}
    return {prefix: "org.apache.iceberg.spark.SparkCatalog", **own}


def java() -> Path:
    """Return the home of a Java that Spark 4.1 supports. Raises RuntimeError with what to install."""
    found = sorted([*Path("/usr/lib/jvm").glob("java-17-*"), *Path("/usr/lib/jvm").glob("java-21-*")])
    if not found:
        raise RuntimeError("Spark needs Java 17 or 21: install openjdk-17-jre-headless")
    return found[0]


@contextlib.contextmanager
def spark_cluster(folder: Path, workers: int = 2) -> Iterator[SparkCluster]:
    """Run a master and workers of one core each until the block ends. A process can run one cluster at a time."""
    port, master_page, *worker_pages = free_ports(2 + workers)
    environment = {
        **os.environ, "JAVA_HOME": str(java()), "SPARK_HOME": str(HOME), "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_DAEMON_JAVA_OPTS": " ".join(SHORT_LIVED_JAVA),
    }  # fmt: skip
    launcher = str(HOME / "bin" / "spark-class")
    master = f"spark://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        log = folder / "master.log"
        command = [
            launcher, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port),
            "--webui-port", str(master_page),
        ]  # fmt: skip
        process = stack.enter_context(running(command, log, environment))
        wait_ready(f"http://127.0.0.1:{master_page}/json/", process, log)
        started = []
        for number, page in enumerate(worker_pages, 1):
            command = [
                launcher, "org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--webui-port", str(page),
                "--cores", "1", "--memory", "1g", master,
            ]  # fmt: skip
            log = folder / f"worker-{number}.log"
            started.append((stack.enter_context(running(command, log, environment)), log))
        for process, log in started:
            wait_until(lambda log=log: "registered with master" in log.read_text(), "a Spark worker", process, log)  # type: ignore[misc]
        yield SparkCluster(master, workers, stack.enter_context(_session(master, folder)))


@contextlib.contextmanager
def spark_connect(folder: Path, catalog: Mapping[str, str]) -> Iterator[str]:
    """Run a Spark Connect server with two threads until the block ends. Yields its address, `sc://…`. catalog: the
    result of catalog_settings."""
    (port,) = free_ports(1)
    settings = {
        **_SETTINGS, **catalog, "spark.jars": _jars(), "spark.connect.grpc.binding.port": str(port),
        "spark.local.dir": str(folder),
    }  # fmt: skip
    command = [
        str(HOME / "bin" / "spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        "--master", "local[2]", *(part for pair in settings.items() for part in ("--conf", "=".join(pair))),
        "spark-internal",
    ]  # fmt: skip
    environment = {**os.environ, "JAVA_HOME": str(java()), "SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": "127.0.0.1"}
    log = folder / "connect.log"
    with running(command, log, environment) as process:
        wait_until(lambda: "Spark Connect server started" in log.read_text(errors="replace"), "Spark", process, log)
        yield f"sc://127.0.0.1:{port}"


_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": " ".join(SHORT_LIVED_JAVA),
    "spark.executor.memory": "768m",
    "spark.executor.extraJavaOptions": " ".join(SHORT_LIVED_JAVA),
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
}


def _jars() -> str:
    return ",".join(map(str, sorted((built("query-engines.sh") / "spark").glob("*.jar"))))


@contextlib.contextmanager
def _session(master: str, folder: Path) -> Iterator[SparkSession]:
    os.environ.update(JAVA_HOME=str(java()), SPARK_LOCAL_IP="127.0.0.1", SPARK_HOME=str(HOME))
    settings = {**_SETTINGS, "spark.jars": _jars(), "spark.sql.warehouse.dir": str(folder / "warehouse")}
    builder = SparkSession.builder.master(master).appName("gputally-tests")
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        gateway = session.sparkContext._gateway
        session.stop()
        if gateway is not None:  # the Java process would else serve the next session, without its settings
            gateway.shutdown()
            gateway.proc.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                gateway.proc.wait(10)
