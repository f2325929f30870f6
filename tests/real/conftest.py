"""Servers that several of the real suites use. Each runs from its first use to the end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dashboards import prometheus_rules
from tests.fakes.fault_proxy import FaultProxy, fault_proxy

if TYPE_CHECKING:
    from tests.real.object_store import ObjectStore
    from tests.real.postgres import Postgres
    from tests.real.rest_catalog import RestCatalog
    from tests.real.spark import SparkCluster
    from tests.real.trino import Trino


@pytest.fixture(scope="module")
def rules_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all alerts and recording rules in `rules.yaml`."""
    path: Path = tmp_path_factory.mktemp("rules")
    (path / "rules.yaml").write_text(prometheus_rules.render_rules())
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    from tests.real.postgres import postgres

    with postgres() as server:
        yield server


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    from tests.real.object_store import object_store

    with object_store(tmp_path_factory.mktemp("object-store")) as store:
        yield store


@pytest.fixture
def store_proxy(object_store: ObjectStore) -> Iterator[FaultProxy]:
    """A proxy in front of the object store that gives chosen requests a fault."""
    with fault_proxy(object_store.url) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A Spark cluster with two workers."""
    from tests.real.spark import spark_cluster

    with spark_cluster(tmp_path_factory.mktemp("spark")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def trino(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trino]:
    from tests.real.trino import trino

    with trino(tmp_path_factory.mktemp("trino")) as server:
        yield server


@pytest.fixture(scope="session")
def rest_catalog(object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalog]:
    from tests.real.rest_catalog import rest_catalog

    with rest_catalog(tmp_path_factory.mktemp("rest-catalog"), object_store) as server:
        yield server


@pytest.fixture(scope="session")
def hive_metastore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Hive metastore."""
    from tests.real.hive_metastore import hive_metastore

    with hive_metastore(tmp_path_factory.mktemp("hive-metastore")) as address:
        yield address


@pytest.fixture(scope="session")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """PyIceberg's properties for the Glue catalog."""
    from tests.real.glue import glue

    with glue(tmp_path_factory.mktemp("glue")) as properties:
        yield properties
