"""Writers commit concurrently, and nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.table import Table
from sqlalchemy.exc import OperationalError

from accountant.core.errors import LakeUnavailable
from accountant.core.settings import Lake, LakeCatalog
from accountant.lake.iceberg_catalog import Catalogue
from accountant.lake.tables import DAYS
from tests.hypothesis_examples import examples
from tests.lake.concurrent_writers import claimed, control_total, write_side_by_side


@pytest.mark.thorough
def test_writers_of_many_ledgers_lose_and_double_nothing(tmp_path):
    writers, commits = examples(4, 8), 2
    found = write_side_by_side(Lake(warehouse=str(tmp_path)), writers, commits)
    assert found == sorted((f"ledger-{number}", commits) for number in range(writers))


class _Unsure:
    """A table whose commits succeed although their answers are lost."""

    def __init__(self, table: Table, failure: Exception) -> None:
        self._table, self._failure = table, failure

    def __getattr__(self, name: str) -> object:
        return getattr(self._table, name)

    def overwrite(self, *args: object, **given: object) -> None:
        self._table.overwrite(*args, **given)  # type: ignore[arg-type]
        raise self._failure


class _UnsureCatalogue(Catalogue):
    def __init__(self, catalog: Catalog, place: str, settings: Lake, failure: Exception) -> None:
        super().__init__(catalog, place, settings)
        self._failure = failure

    def open(self, table: object, namespace: str = "") -> object:  # type: ignore[override]
        return _Unsure(super().open(table, namespace), self._failure)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "failure",
    [CommitStateUnknownException("504"), OperationalError("COMMIT", {}, OSError("cut")), TimeoutError("no answer")],
    ids=["REST", "database", "timeout"],
)
def test_a_commit_whose_outcome_is_not_known_is_looked_up_and_not_written_again(tmp_path, failure):
    lake = Lake(warehouse=str(tmp_path), ledger="prod")
    good = claimed(lake, "prod")
    unsure = _UnsureCatalogue(good._catalog, good.place, lake, failure)
    unsure.claim("prod")
    before = len(good.open(DAYS).snapshots())
    unsure.replace(DAYS, DAYS.of_rows([control_total("prod", 7)]), {})
    assert len(good.open(DAYS).snapshots()) == before + 1
    assert [row["rows"] for row in good.read(DAYS)] == [7]


def test_a_catalog_that_cannot_be_reached_is_named_without_its_password():
    lake = Lake(
        warehouse="/nowhere",
        catalog=LakeCatalog(uri="postgresql+psycopg://gputally:hunter2@127.0.0.1:1/lake?connect_timeout=1"),
    )
    with pytest.raises(LakeUnavailable, match="sql catalog") as refused:
        Catalogue.connect(lake).namespaces()
    assert "hunter2" not in str(refused.value)


def test_the_catalog_of_a_folder_is_a_file_in_it(tmp_path):
    for warehouse in (str(tmp_path / "plain"), f"file://{tmp_path}/address"):
        Path(warehouse.removeprefix("file://")).mkdir()
        claimed(Lake(warehouse=warehouse), "prod").close()
    assert sorted(found.parent.name for found in tmp_path.glob("*/catalog.db")) == ["address", "plain"]
    with pytest.raises(LakeUnavailable, match=r"^warehouse s3://books is not a folder: set `lake\.catalog\.uri`"):
        Catalogue.connect(Lake(warehouse="s3://books"))
