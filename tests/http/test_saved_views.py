"""Views of Explore that callers save by name: theirs alone, bounded, only addresses of the page, and kept."""

from __future__ import annotations

import re
import shutil
from contextlib import closing

import pytest

from accountant.ledger.protocols import MOST_VIEWS, SavedView
from accountant.storage.duckdb_ledger import open_ledger
from accountant.storage.folder_or_object_store import in_folder
from gputally.base.clock import VirtualClock
from tests.empty_ledger import fresh
from tests.http.conftest import NOW_MS, bearer, client_of, pod_minutes, token_list
from tests.http.page_parser import EVIL
from tests.usage_records import deliver

PAGE = {"Accept": "text/html"}
VIEW = "/explore?start=3d&by=user,job&sort=allocated_idle:desc"


@pytest.fixture
def client(start_service):
    service, _ = start_service()
    service.ingest.submit_batch(pod_minutes(rows=10)).result()
    return client_of(service, follow_redirects=False)


def save(client, name="idle jobs", address=VIEW, **more):
    return client.post("/views", data={"name": name, "address": address, **more}, headers=PAGE)


def saved(client) -> dict[str, str]:
    text = client.get("/explore?start=1d", headers=PAGE).text
    part = text[text.index("Saved views") : text.index("Save this view")]
    return dict(re.findall(r'<li><a href="([^"]*)">([^<]*)</a>', part))


def test_a_view_is_saved_replaced_listed_opened_and_removed(client):
    assert saved(client) == {}
    answer = save(client)
    assert (answer.status_code, answer.headers["location"]) == (303, VIEW)
    assert saved(client) == {VIEW.replace("&", "&amp;"): "idle jobs"}
    assert client.get(VIEW, headers=PAGE).status_code == 200
    save(client, address="/explore?by=team")
    save(client, name=EVIL)
    assert sorted(saved(client)) == ["/explore?by=team", VIEW.replace("&", "&amp;")]
    assert EVIL not in client.get("/explore?start=1d", headers=PAGE).text
    assert save(client, remove="true").status_code == 303
    assert save(client, name="never there", remove="true").status_code == 303
    assert list(saved(client)) == [VIEW.replace("&", "&amp;")]


@pytest.mark.parametrize(
    "fields",
    [
        {"address": "https://elsewhere.example/explore"},
        {"address": "//elsewhere.example/explore"},
        {"address": "/explore\r\nSet-Cookie: a=b"},
        {"address": "/exploreelse"},
        {"address": "/explore?" + "x" * 2_000},
        {"address": "javascript:alert(1)"},
        {"name": ""},
        {"name": "x" * 61},
        {"name": "two\nlines"},
        {"other": "field"},
    ],
)
def test_what_is_no_view_is_refused(client, fields):
    assert save(client, **fields).status_code == 422
    assert saved(client) == {}


def test_the_views_of_one_owner_are_bounded(client):
    for number in range(MOST_VIEWS):
        assert save(client, name=f"view {number}").status_code == 303
    assert save(client, name="one more").status_code == 409
    assert save(client, name="view 7").status_code == 303, "one of them may be replaced"
    save(client, name="view 8", remove="true")
    assert save(client, name="one more").status_code == 303


def test_a_caller_has_its_own_views_and_a_token_cannot_read_those_of_another(start_service):
    service, _ = start_service(tokens=token_list())
    service.ledger.save_view("read", SavedView("mine", VIEW), NOW_MS)
    client = client_of(service, follow_redirects=False)
    assert "mine" in client.get("/explore?start=1d", headers=PAGE | bearer("token-of-read")).text
    assert ">mine<" not in client.get("/explore?start=1d", headers=PAGE | bearer("token-of-admin")).text
    form = {"name": "x", "address": VIEW}
    assert client.post("/views", data=form).status_code == 401
    assert client.post("/views", data=form, headers=bearer("token-of-ingest")).status_code == 403


def test_views_outlive_the_ledgers_volume(tmp_path):
    archive = in_folder(tmp_path / "archive")
    with closing(open_ledger(fresh(tmp_path / "one.duckdb"), VirtualClock(NOW_MS), archive=archive)) as ledger:
        deliver(ledger, NOW_MS, pod_minutes(rows=10))
        ledger.save_view("ada", SavedView("mine", VIEW), NOW_MS)
        assert ledger.archive(NOW_MS) is not None
    with closing(open_ledger(fresh(tmp_path / "two.duckdb"), VirtualClock(NOW_MS), archive=archive)) as restored:
        assert restored.views("ada") == (SavedView("mine", VIEW),)


def test_a_view_that_is_the_only_change_since_a_backup_is_restored_from_the_archive(tmp_path):
    """No row and no act shows that the part is newer than the backup. Views of the backup stay, the newer one of a name
    counts, also when it is opened again."""
    archive = in_folder(tmp_path / "archive")
    one, backup = fresh(tmp_path / "one.duckdb"), tmp_path / "backup.duckdb"
    with closing(open_ledger(one, VirtualClock(NOW_MS), archive=archive)) as ledger:
        deliver(ledger, NOW_MS, pod_minutes(rows=10))
        for name in ("mine", "kept"):
            ledger.save_view("ada", SavedView(name, "/jobs?start=1d"), NOW_MS)
        assert ledger.archive(NOW_MS) is not None
    shutil.copyfile(one, backup)
    with closing(open_ledger(one, VirtualClock(NOW_MS), archive=archive)) as ledger:
        ledger.save_view("ada", SavedView("mine", VIEW), NOW_MS + 1)
        ledger.save_view("bo", SavedView("other", VIEW), NOW_MS + 2)
        assert ledger.archive(NOW_MS + 3) is not None
    for _ in range(2):
        with closing(open_ledger(backup, VirtualClock(NOW_MS), archive=archive)) as restored:
            assert restored.views("ada") == (SavedView("kept", "/jobs?start=1d"), SavedView("mine", VIEW))
            assert restored.views("bo") == (SavedView("other", VIEW),)
            restored.checkpoint()


def test_a_removal_that_is_the_only_change_since_a_backup_is_restored_from_the_archive(tmp_path):
    """Also if the clock shows no later instant. An older part brings nothing back."""
    archive = in_folder(tmp_path / "archive")
    one, backup = fresh(tmp_path / "one.duckdb"), tmp_path / "backup.duckdb"
    with closing(open_ledger(one, VirtualClock(NOW_MS), archive=archive)) as ledger:
        deliver(ledger, NOW_MS, pod_minutes(rows=10))
        for name in ("first", "second", "third"):
            ledger.save_view("ada", SavedView(name, VIEW), NOW_MS)
        assert ledger.archive(NOW_MS) is not None
    shutil.copyfile(one, backup)
    with closing(open_ledger(one, VirtualClock(NOW_MS), archive=archive)) as ledger:
        for name in ("third", "first"):
            ledger.remove_view("ada", name)
        ledger.remove_view("bo", "none of this name")
        assert ledger.archive(NOW_MS + 1) is not None
        assert ledger.views("ada") == (SavedView("second", VIEW),)
        assert ledger.views("") == ()
    for _ in range(2):
        with closing(open_ledger(backup, VirtualClock(NOW_MS), archive=archive)) as restored:
            assert restored.views("ada") == (SavedView("second", VIEW),)
            restored.checkpoint()
    with closing(open_ledger(backup, VirtualClock(NOW_MS), archive=archive)) as restored:
        restored.save_view("ada", SavedView("first", "/jobs"), NOW_MS - 1)
        assert restored.views("ada") == (SavedView("first", "/jobs"), SavedView("second", VIEW))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (
            "/explore?start=3d&by=user,job&sort=-allocated_idle",
            "/explore?start=3d&by=user,job&sort=allocated_idle:desc",
        ),
        ("/explore?start=3d&by=pod&sort=allocated_idle", "/explore?start=3d&by=pod&sort=allocated_idle:asc"),
        ("/explore?start=3d&by=pod&sort=-pod", "/explore?start=3d&by=pod&sort=pod:desc"),
        ("/jobs?start=3d&sort=idle", "/jobs?start=3d&sort=idle"),
        ("/jobs?start=3d&sort=idle&reverse=true&search=x", "/jobs?start=3d&search=x&sort=idle:asc"),
        ("/jobs?start=3d&reverse=true", "/jobs?start=3d&sort=cost:asc"),
        ("/nodes?start=3d&sort=pool&reverse=true", "/nodes?start=3d&sort=pool:desc"),
        ("/nodes?where.team=a&where.team=b&reverse=true", "/nodes?where.team=a&where.team=b&sort=name:desc"),
        ("/nodes", "/nodes"),
        (VIEW, VIEW),
    ],
)
def test_a_view_that_an_earlier_version_saved_opens_in_its_order(start_service, before, now):
    service, _ = start_service(tokens=token_list())
    service.ledger.save_view("read", SavedView("mine", before), NOW_MS)
    client = client_of(service, follow_redirects=False)
    caller = PAGE | bearer("token-of-read")
    text = client.get("/explore?start=1d", headers=caller).text
    assert f'<a href="{now.replace("&", "&amp;")}">mine</a>' in text
    assert client.get(now, headers=caller).status_code == 200


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("/explore?by=pod&sort=-busy", "/explore?by=pod&sort=busy:desc"),
        ("/jobs?sort=idle&reverse=true", "/jobs?sort=idle:asc"),
        ("/jobs?sort=idle&reverse=false", "/jobs?sort=idle:desc"),
        ("/jobs?sort=idle&reverse=true&page=3", "/jobs?sort=idle:asc&page=3"),
        ("/explore?by=pod&sort=-busy&page=2", "/explore?by=pod&sort=busy:desc&page=2"),
        ("/nodes?start=3d&sort=pool&reverse=true", "/nodes?start=3d&sort=pool:desc"),
    ],
)
def test_a_link_of_an_earlier_version_leads_to_the_view_in_its_order(client, before, now):
    answer = client.get(before, headers=PAGE)
    assert (answer.status_code, answer.headers["location"]) == (303, now)
    assert client.get(now, headers=PAGE).status_code == 200
