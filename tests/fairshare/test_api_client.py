"""The Kubernetes client on a loopback server with the few REST answers that the controller needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from gputally.base.errors import ClusterError, ClusterRefused, ClusterUnavailable, Conflict, NotFound, VersionGone
from gputally.kubernetes import api_client
from gputally.kubernetes.api_client import MOST_LINE_BYTES, PAGE, KubernetesCluster
from gputally.kubernetes.objects import CONFIG_MAP, Event
from gputally.testing.fake_scheduler import QUEUE
from gputally.testing.http_server import Handler, Trickling, TricklingHead, listening
from tests.fairshare.builders import object_of
from tests.fakes.fault_proxy import Fault, fault_proxy

Reply = Callable[[str, str, dict[str, list[str]], Any], tuple[int, Any]]


class Stub:
    """Records requests and answers with `reply`."""

    def __init__(self) -> None:
        self.reply: Reply = lambda *_: (200, {})
        self.asked: list[tuple[str, str, dict[str, list[str]], Any, dict[str, str]]] = []


@contextmanager
def _served(stub: Stub) -> Iterator[str]:
    class ApiServer(Handler):
        def _answer(self) -> None:
            content = self.content()
            body = json.loads(content) if content else None
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            stub.asked.append((self.command, url.path, query, body, {k.lower(): v for k, v in self.headers.items()}))
            status, answer = stub.reply(self.command, url.path, query, body)
            self.say(
                status,
                answer if isinstance(answer, bytes) else json.dumps(answer).encode(),
                Content_Type="application/json",
            )

        do_GET = do_PATCH = do_POST = _answer

    with listening(ApiServer) as url:
        yield url


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def cluster(stub: Stub) -> Iterator[KubernetesCluster]:
    with _served(stub) as url:
        settings = client.Configuration(host=url, api_key={"BearerToken": "Bearer secret"})
        with client.ApiClient(settings) as api:
            yield KubernetesCluster(api, [QUEUE, CONFIG_MAP], timeout_s=5)


def test_lists_are_read_page_by_page_and_sorted(cluster: KubernetesCluster, stub: Stub) -> None:
    pages = {None: (["b", "c"], "next"), "next": (["a"], None)}

    def reply(method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        names, token = pages[query.get("continue", [None])[0]]
        items = [{"metadata": {"name": name}} for name in names]
        return 200, {"metadata": {"continue": token} if token else {}, "items": items}

    stub.reply = reply
    listed = cluster.list(QUEUE)
    assert [obj["metadata"]["name"] for obj in listed] == ["a", "b", "c"]
    assert {(obj["apiVersion"], obj["kind"]) for obj in listed} == {("fake.gputally.dev/v1", "Queue")}
    assert [(method, path) for method, path, *_ in stub.asked] == [("GET", "/apis/fake.gputally.dev/v1/queues")] * 2
    assert stub.asked[0][2] == {"limit": [str(PAGE)]}
    assert stub.asked[0][4]["authorization"] == "Bearer secret"


def test_apply_is_server_side_and_never_forced(cluster: KubernetesCluster, stub: Stub) -> None:
    stub.reply = lambda method, path, query, body: (200, body)
    obj = object_of(QUEUE, "a", {"x": 1})
    assert cluster.apply(obj, field_manager="us", dry_run=True) == obj
    cluster.apply(obj, field_manager="us", subresource="status")
    data = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "ns"}, "data": {}}
    cluster.apply(data, field_manager="us")
    (method, path, query, body, headers), status, config = stub.asked
    assert (method, path, body) == ("PATCH", "/apis/fake.gputally.dev/v1/queues/a", obj)
    assert query == {"fieldManager": ["us"], "fieldValidation": ["Strict"], "dryRun": ["All"]}
    assert headers["content-type"] == "application/apply-patch+yaml"
    assert status[1] == "/apis/fake.gputally.dev/v1/queues/a/status"
    assert "dryRun" not in status[2]
    assert config[1] == "/api/v1/namespaces/ns/configmaps/c"


def test_a_conflict_names_the_owners(cluster: KubernetesCluster, stub: Stub) -> None:
    causes = [
        {"message": 'conflict with "argocd" using fake.gputally.dev/v1', "field": ".spec.b"},
        {"message": 'conflict with "kubectl"', "field": ".spec.a"},
    ]
    stub.reply = lambda *_: (409, {"message": "Apply failed with 2 conflicts:\nmore", "details": {"causes": causes}})
    with pytest.raises(Conflict) as refused:
        cluster.apply(object_of(QUEUE, "a"), field_manager="us")
    assert refused.value.owners == (("argocd", ".spec.b"), ("kubectl", ".spec.a"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ClusterRefused), (401, ClusterRefused), (403, ClusterRefused), (404, NotFound), (409, Conflict), (410,
        VersionGone), (422, ClusterRefused), (429, ClusterUnavailable), (500, ClusterUnavailable), (503,
        ClusterUnavailable),
    ],
)  # fmt: skip
def test_every_status_is_an_error(
    cluster: KubernetesCluster, stub: Stub, status: int, kind: type[ClusterError]
) -> None:
    stub.reply = lambda *_: (status, {"kind": "Status", "message": "because"})
    with pytest.raises(ClusterError) as told:
        cluster.get(QUEUE, "a")
    assert type(told.value) is kind
    assert str(told.value) == f"GET /apis/fake.gputally.dev/v1/queues/a: {status}: because"


def test_an_answer_that_is_none(cluster: KubernetesCluster, stub: Stub) -> None:
    stub.reply = lambda *_: (200, b"<html>")
    with pytest.raises(ClusterUnavailable, match="not JSON"):
        cluster.get(CONFIG_MAP, "a", "ns")
    stub.reply = lambda *_: (502, b"bad gateway")
    with pytest.raises(ClusterUnavailable, match="502: bad gateway"):
        cluster.get(CONFIG_MAP, "a", "ns")


def test_a_server_that_is_not_there() -> None:
    nowhere = client.ApiClient(client.Configuration(host="http://127.0.0.1:1", retries=False))
    with nowhere as api, pytest.raises(ClusterUnavailable, match="the API server does not answer"):
        KubernetesCluster(api, [QUEUE], timeout_s=1).list(QUEUE)


def test_an_event_has_a_fraction_of_a_second_and_a_name_of_its_content(cluster: KubernetesCluster, stub: Stub) -> None:
    event = Event(QUEUE, "a", "", "u-1", "Warning", "Held", "x" * 2000, 1_790_812_800_000)
    cluster.event(event)
    stub.reply = lambda *_: (409, {"reason": "AlreadyExists"})
    cluster.event(event)
    (_, path, _, first, _), (_, _, _, second, _) = stub.asked
    assert path == "/apis/events.k8s.io/v1/namespaces/default/events"
    assert first["eventTime"] == "2026-10-01T00:00:00.000000Z"
    assert first["regarding"] == {"apiVersion": QUEUE.api_version, "kind": "Queue", "name": "a", "uid": "u-1"}
    assert len(first["note"]) == 1024
    assert first["metadata"]["name"] == second["metadata"]["name"]
    stub.reply = lambda *_: (403, {"message": "events is forbidden"})
    with pytest.raises(ClusterRefused):
        cluster.event(event)


@pytest.mark.parametrize("content", [None, "", "[]", "{", "clusters: 1", "users: [1]", "\0"])
def test_without_a_cluster_one_line_names_the_file_and_how_to_name_another(tmp_path: Path, content: str | None) -> None:
    place = tmp_path / "kubeconfig"
    if content is not None:
        place.write_text(content)
    with pytest.raises(ClusterUnavailable) as refused:
        KubernetesCluster.connect([QUEUE], place)
    said = str(refused.value)
    assert len(said.splitlines()) == 1
    assert all(part in said for part in (str(place), "--kubeconfig", "KUBECONFIG"))


def kubeconfig_of(url: str, folder: Path) -> Path:
    """Write a kubeconfig of the server at `url`."""
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "from-file"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


def test_a_kubeconfig_is_read(tmp_path: Path, stub: Stub) -> None:
    stub.reply = lambda *_: (200, {"items": []})
    with _served(stub) as url:
        assert KubernetesCluster.connect([QUEUE], kubeconfig_of(url, tmp_path)).list(QUEUE) == []
    assert stub.asked[0][4]["authorization"] == "Bearer from-file"


def test_a_watch_line_that_is_too_long_for_an_object_is_not_collected(cluster: KubernetesCluster, stub: Stub) -> None:
    stub.reply = lambda *_: (200, b"x" * (MOST_LINE_BYTES + 2**20))
    with pytest.raises(ClusterUnavailable, match=rf"a line of the watch is longer than {MOST_LINE_BYTES} bytes"):
        list(cluster.api().watch(CONFIG_MAP.path(), {"resourceVersion": "1"}))


@pytest.mark.parametrize(
    ("fault", "reads", "writes"), [(Fault.HANGS, 2, 1), (Fault.CUT, 2, 1), (Fault.BUSY, 1, 1), (Fault.REFUSED, 1, 1)]
)
def test_a_request_that_gets_no_answer_is_repeated_at_most_once(
    stub: Stub, tmp_path: Path, fault: Fault, reads: int, writes: int
) -> None:
    """So that its time limit holds. A Retry-After is for the caller, which has other things to do meanwhile."""
    with _served(stub) as url, fault_proxy(url) as proxy:
        cluster = KubernetesCluster.connect([QUEUE], kubeconfig_of(proxy.url, tmp_path), timeout_s=0.2)
        proxy.spoil(".", fault, times=9)
        with pytest.raises(ClusterUnavailable):
            cluster.get(QUEUE, "a")
        assert len(proxy.seen) == reads
        with pytest.raises(ClusterUnavailable):
            cluster.apply(object_of(QUEUE, "a"), field_manager="us")
        assert len(proxy.seen) == reads + writes


def test_an_answer_that_comes_byte_by_byte_ends_with_the_time_of_its_request() -> None:
    """Else a slow proxy would hold the thread of the leader election, or of a cycle, for as long as it likes."""
    with listening(Trickling) as url, client.ApiClient(client.Configuration(host=url)) as api:
        cluster = KubernetesCluster(api, [QUEUE], timeout_s=0.5)
        with pytest.raises(ClusterUnavailable, match="no whole answer within"):
            cluster.get(QUEUE, "a")


def test_headers_that_come_byte_by_byte_end_with_the_time_of_their_request(tmp_path: Path) -> None:
    with listening(TricklingHead) as url:
        place = tmp_path / "kubeconfig"
        place.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }))  # fmt: skip
        cluster = KubernetesCluster.connect([QUEUE], place, timeout_s=0.2)
        with pytest.raises(ClusterUnavailable, match="does not answer"):
            cluster.get(QUEUE, "a")


def test_an_answer_has_a_largest_size(cluster: KubernetesCluster, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "MOST_ANSWER_BYTES", 1_000)
    stub.reply = lambda *_: (200, {"metadata": {"name": "a"}, "spec": "x" * 2_000})
    with pytest.raises(ClusterUnavailable, match="more than 1000 bytes"):
        cluster.get(QUEUE, "a")
    stub.reply = lambda *_: (200, {"metadata": {"name": "a"}})
    assert cluster.get(QUEUE, "a")["metadata"]["name"] == "a"
