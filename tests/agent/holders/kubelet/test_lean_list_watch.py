"""Lists and watches with every kind of fault, and the resulting stores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.settings import SettingsError
from agent.holders.kubelet.device_allocations import SliceStore
from agent.holders.kubelet.kubernetes_api_objects import PodView
from agent.holders.kubelet.kubernetes_source import NodeStore, release_reason, replica_mode
from agent.holders.kubelet.lean_list_watch import (
    ABSENT_MS,
    BACKOFF_CAP_MS,
    BOUND_PODS_FILE,
    DELETED_KEPT_MS,
    ApiServer,
    ApiUnavailable,
    BoundPods,
    LeanReflector,
    PodStore,
    in_cluster,
)
from gputally.base.clock import VirtualClock
from tests.agent.holders.kubelet.pods import UID, Following, Seen, pod_object
from tests.agent.sample_values import T0
from tests.fakes.apiserver.server import FakeApiServer
from tests.hypothesis_examples import examples

PODS = "/api/v1/pods"
UPGRADE, CLIENT = "nvidia.com/gpu-driver-upgrade-state", "nvidia.com/gpu.deploy.client"


@pytest.fixture
def api(api_server: FakeApiServer, token: Path) -> Iterator[ApiServer]:
    made = ApiServer(api_server.url, None, token)
    yield made
    made.close()


def half() -> float:
    return 0.5


@pytest.fixture
def seen(api: ApiServer, api_server: FakeApiServer, clock: VirtualClock) -> Iterator[Seen]:
    """The pod store of this node."""
    seen = Seen(clock)
    following = Following(LeanReflector(api, PODS, "spec.nodeName=node-1", seen, clock, half))
    yield seen
    assert following.reflector.failure == ""
    api.close()
    api_server.cut()
    following.end()


def elsewhere(name: str) -> dict[str, Any]:
    return pod_object(name=name, uid=name, spec={"nodeName": "node-2"})


def text(name: str, **more: Any) -> bytes:
    return json.dumps(pod(name, **more)).encode()


@pytest.fixture
def store(clock: VirtualClock) -> PodStore:
    return PodStore("node-1", ("team",), clock)


def pod(name: str, **more: Any) -> dict[str, Any]:
    return pod_object(name=name, uid=more.pop("uid", name), **more)


def test_what_happens_on_this_node_is_followed(api_server: FakeApiServer, seen: Seen) -> None:
    api_server.put(pod("a"))
    api_server.put(elsewhere("x"))
    seen.until(lambda: seen.names() == {"a"})
    api_server.put(pod("b"))
    api_server.delete("Pod", "vision", "a")
    seen.until(lambda: seen.names() == {"b"})


def test_a_break_is_gone_on_from_where_it_was(api_server: FakeApiServer, seen: Seen) -> None:
    api_server.put(pod("a"))
    seen.until(lambda: seen.names() == {"a"})
    for name in ("b", "c"):
        api_server.cut()
        api_server.put(pod(name))
        seen.until(lambda name=name: name in seen.names())  # type: ignore[misc]
    assert sum("watch=true" not in request for request in api_server.requests) == 1


def test_a_version_that_is_too_old_is_listed_anew(api_server: FakeApiServer, seen: Seen) -> None:
    api_server.put(pod("a"))
    seen.until(lambda: seen.names() == {"a"})
    with seen.changed:  # nothing is taken in while the history is lost
        api_server.put(pod("b"))
        api_server.delete("Pod", "vision", "a")
        api_server.compact()
    seen.until(lambda: seen.names() == {"b"})
    api_server.put(pod("c"))
    seen.until(lambda: seen.names() == {"b", "c"})


def test_a_long_list_comes_in_pages(api_server: FakeApiServer, api: ApiServer, clock: VirtualClock) -> None:
    api_server.page_items = 3
    for number in range(8):
        api_server.put(pod(f"p{number}"))
    seen = Seen(clock)
    LeanReflector(api, PODS, "spec.nodeName=node-1", seen, clock)._list()
    assert len(seen.names()) == 8
    assert len(api_server.requests) == 3


def scripted(*answers: bytes | ApiUnavailable) -> Any:
    """An API with empty lists and with watches that send these events, one watch after the other."""

    class Scripted:
        asked = 0

        def page(self, path: str, parameters: Mapping[str, str]) -> bytes:
            return b'{"metadata": {"resourceVersion": "5"}}'

        def lines(self, path: str, parameters: Mapping[str, str], timeout_s: float) -> Iterator[bytes]:
            self.asked += 1
            answer = answers[min(self.asked, len(answers)) - 1]
            if isinstance(answer, ApiUnavailable):
                raise answer
            yield from answer.splitlines()

    return Scripted()


@pytest.mark.parametrize(("error", "pauses"), [
    (ApiUnavailable("down"), [750, 1_500, 3_000]),
    (ApiUnavailable("forbidden", 403), [45_000, 45_000, 45_000]),
    (ApiUnavailable("busy", 429, retry_after_s=120), [120_000, 120_000, 120_000]),
    (ApiUnavailable("gone", 410), [0, 1_500, 3_000]),
])  # fmt: skip
def test_failures_back_off(store: PodStore, clock: VirtualClock, error: ApiUnavailable, pauses: list[int]) -> None:
    reflector = LeanReflector(scripted(error), PODS, "x=y", store, clock, half)
    assert [reflector.step() for _ in range(3)] == pauses


def test_what_the_cluster_does_not_have_is_no_failure_where_it_is_optional(
    store: PodStore, clock: VirtualClock, api: ApiServer
) -> None:
    path = "/apis/resource.k8s.io/v9/things"
    optional = LeanReflector(api, path, "x=y", store, clock, half, optional=True)
    assert (optional.step(), optional.failure, optional.synced) == (ABSENT_MS, "", False)
    needed = LeanReflector(api, path, "x=y", store, clock, half)
    needed.step()
    assert "HTTP 404" in needed.failure


def test_back_off_is_bounded(store: PodStore, clock: VirtualClock) -> None:
    reflector = LeanReflector(scripted(ApiUnavailable("down")), PODS, "x=y", store, clock, lambda: 1.0)
    assert [reflector.step() for _ in range(60)][-1] == BACKOFF_CAP_MS
    assert reflector.failure == "down"
    assert reflector.synced


lines = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda kind, thing: json.dumps({"type": kind, "object": thing}).encode(),
        st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "NEW"]),
        st.one_of(
            st.just(pod_object()),
            st.just({"metadata": {"resourceVersion": "9"}}),
            st.just({"code": 410, "message": "too old"}),
            st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
            st.none(),
        ),
    ),
)


@settings(max_examples=examples(33, 200))
@given(st.lists(lines, max_size=5))
def test_no_line_of_a_watch_makes_it_fail(said: list[bytes]) -> None:
    clock = VirtualClock(T0)
    pods, node = PodStore("node-1", ("*",), clock), NodeStore("node-1", lambda before, reason: None)
    for store in (pods, node, SliceStore()):
        reflector = LeanReflector(scripted(b"\n".join(said)), PODS, "x=y", store, clock, half)
        assert reflector.step() >= 0


class TestApiServer:
    def test_the_token_is_read_again(self, api_server: FakeApiServer, api: ApiServer, token: Path) -> None:
        api.page(PODS, {})
        api_server.token = "renewed"
        with pytest.raises(ApiUnavailable, match="HTTP 401 Unauthorized"):
            api.page(PODS, {})
        token.write_text("renewed\n")
        api.page(PODS, {})

    def test_a_refusal_has_its_status_and_its_retry(self, api_server: FakeApiServer, api: ApiServer) -> None:
        api_server.refuse = 429, {"Retry-After": "7"}
        with pytest.raises(ApiUnavailable) as refused:
            api.page(PODS, {})
        assert (refused.value.status, refused.value.retry_after_s) == (429, 7)

    def test_a_missing_token_is_said_and_no_request_made(self, api_server: FakeApiServer, tmp_path: Path) -> None:
        with pytest.raises(ApiUnavailable, match="token file"):
            ApiServer(api_server.url, None, tmp_path / "none").page(PODS, {})
        assert api_server.requests == []

    def test_nothing_listens(self, token: Path) -> None:
        with pytest.raises(ApiUnavailable, match="unreachable"):
            ApiServer("http://127.0.0.1:1", None, token).page(PODS, {})

    def test_after_closing_nothing_is_asked(self, api_server: FakeApiServer, api: ApiServer) -> None:
        api.close()
        with pytest.raises(ApiUnavailable, match="closed"):
            api.page(PODS, {})
        assert api_server.requests == []

    def test_the_address_in_a_cluster(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match=r"KUBERNETES_SERVICE_HOST is not set: .* set --api-url"):
            in_cluster({})
        with pytest.raises(SettingsError, match="CA file"):
            in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}, tmp_path)


class TestPodStore:
    def test_a_pod_that_came_and_went_between_two_samples_is_told(self, store: PodStore, clock: VirtualClock) -> None:
        item = text("a", labels={"team": "vision"})
        store.apply("ADDED", item)
        store.apply("DELETED", item)
        (facts,) = store.facts(T0, ())
        assert (facts.uid, facts.labels, facts.ended_ms, facts.observed_ms) == ("a", {"team": "vision"}, T0, T0)
        assert store.deleted() == {("vision", "a")}
        clock.advance(DELETED_KEPT_MS)
        assert store.facts(T0, ()) == ()

    def test_what_is_missing_after_a_break_ended(self, store: PodStore) -> None:
        store.replace([text(name) for name in "ab"])
        store.replace([text("b")])
        assert [(f.uid, f.ended_ms) for f in store.facts(T0, ())] == [("a", T0), ("b", None)]

    def test_another_pod_of_the_same_name_is_another_pod(self, store: PodStore) -> None:
        store.apply("ADDED", text("a", uid="1"))
        store.apply("ADDED", text("a", uid="2"))
        store.apply("DELETED", text("a", uid="1"))
        assert [(f.uid, f.ended_ms) for f in store.facts(T0, ())] == [("1", T0), ("2", None)]
        assert list(store.deleted()) == []

    def test_pods_without_a_gpu_are_told_only_if_they_hold_one(self, store: PodStore) -> None:
        store.apply("ADDED", text("a", gpus=0))
        assert store.facts(T0, ()) == ()
        assert [f.uid for f in store.facts(T0, {"a"})] == ["a"]

    def test_a_pod_that_cannot_be_read_harms_no_other(self, store: PodStore, caplog: pytest.LogCaptureFixture) -> None:
        store.replace([b"{}", text("a")])
        store.apply("ADDED", b"[]")
        assert (len(store.views()), caplog.text.count("a pod cannot be decoded")) == (1, 2)


def test_a_slice_that_changes_drivers_or_goes_takes_its_devices_along() -> None:
    store = SliceStore()

    def published(driver: str = "gpu.nvidia.com", **uuids: str | None) -> bytes:
        devices = [{"name": name, "attributes": {"uuid": {"string": uuid}}} for name, uuid in uuids.items()]
        spec = {"driver": driver, "pool": {"name": "n"}, "devices": devices}
        return json.dumps({"metadata": {"name": "s"}, "spec": spec}).encode()

    store.apply("ADDED", published(a="GPU-a", b=None))
    assert {key: device.uuid for key, device in store.devices().items()} == {("n", "a"): "GPU-a", ("n", "b"): ""}
    store.apply("MODIFIED", b"{}")
    assert len(store.devices()) == 2
    store.apply("MODIFIED", published("other", a="GPU-a"))
    assert store.devices() == {}
    store.replace([published(a="GPU-a")])
    store.apply("DELETED", published(a="GPU-a"))
    assert store.devices() == {}


class TestNodeLabels:
    @pytest.mark.parametrize(("labels", "reason"), [
        ({}, ""),
        ({UPGRADE: "upgrade-done"}, ""),
        ({UPGRADE: "upgrade-required"}, ""),
        ({UPGRADE: "wait-for-jobs-required"}, ""),
        ({UPGRADE: "pod-restart-required"}, f"{UPGRADE}=pod-restart-required"),
        ({UPGRADE: "validation-required"}, ""),
        ({"nvidia.com/mig.config.state": "pending"}, "nvidia.com/mig.config.state=pending"),
        ({"nvidia.com/mig.config.state": "rebooting"}, "nvidia.com/mig.config.state=rebooting"),
        ({"nvidia.com/mig.config.state": "success"}, ""),
        ({"nvidia.com/mig.config.state": "failed"}, ""),
        ({"nvidia.com/gpu.deploy.dcgm": "paused-for-mig-change"}, "nvidia.com/gpu.deploy.dcgm=paused-for-mig-change"),
        ({"nvidia.com/gpu.deploy.dcgm": "true", "nvidia.com/gpu.deploy.driver": "false"}, ""),
        ({CLIENT: "true"}, ""),
        ({CLIENT: "paused-for-driver-upgrade"}, f"{CLIENT}=paused-for-driver-upgrade"),
    ])  # fmt: skip
    def test_who_asks_for_the_driver(self, labels: dict[str, str], reason: str) -> None:
        assert release_reason(labels) == reason

    def test_the_driver_is_let_go_and_taken_again(self) -> None:
        told: list[str] = []
        store = NodeStore("node-1", lambda before, reason: told.append(reason))

        def node(name: str = "node-1", **labels: str) -> bytes:
            named = {f"nvidia.com/mig.config.{key}": value for key, value in labels.items()}
            return json.dumps({"kind": "Node", "metadata": {"name": name, "labels": named}}).encode()

        store.replace([node(state="success")])
        store.apply("MODIFIED", node(state="pending"))
        store.apply("MODIFIED", node("another", state="success"))
        store.apply("MODIFIED", b"{}")
        store.apply("MODIFIED", node(state="rebooting"))
        store.apply("MODIFIED", node(state="success"))
        store.apply("MODIFIED", node(state="pending"))
        store.apply("DELETED", node(state="pending"))
        pending, rebooting = "nvidia.com/mig.config.state=pending", "nvidia.com/mig.config.state=rebooting"
        assert told == [pending, rebooting, "", pending, ""]

    def test_how_replicas_are_shared(self) -> None:
        assert replica_mode({}) == "time-slicing"
        assert replica_mode({"nvidia.com/gpu.sharing-strategy": "mps"}) == "mps"
        assert replica_mode({"cloud.google.com/gke-gpu-sharing-strategy": "mps"}) == "mps"


# --- what a pod declared counts as it was when the pod was bound -----------------------------------

BOUND = {
    "gpus": 0,
    "labels": {"fake.gputally.dev/gpu-group": "g1", "fake.gputally.dev/queue": "vision"},
    "annotations": {"fake.gputally.dev/fraction": "0.5"},
}


def bound(**changed: Any) -> bytes:
    return json.dumps(pod_object(**{**BOUND, **changed})).encode()


class BoundStore(PodStore):
    """A store that keeps pods' declarations in a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__("node-1", (), VirtualClock(T0), bound=BoundPods(folder / BOUND_PODS_FILE))

    @property
    def only(self) -> PodView:
        (view,) = self.views().values()
        return view


@pytest.fixture
def pods(tmp_path: Path) -> BoundStore:
    return BoundStore(tmp_path)


@pytest.mark.parametrize("later", [
    {"annotations": {"fake.gputally.dev/fraction": "0.01"}},
    {"annotations": {}},
    {"annotations": {"fake.gputally.dev/memory": "1"}},
    {"labels": {"fake.gputally.dev/gpu-group": "g2", "fake.gputally.dev/queue": "vision"}},
    {"labels": {"fake.gputally.dev/queue": "vision"}},
    {"labels": {"fake.gputally.dev/gpu-group": "g1", "fake.gputally.dev/queue": "speech"}},
    {"labels": {"fake.gputally.dev/gpu-group": "g1"}},
])  # fmt: skip
@pytest.mark.parametrize("restart", [False, True])
def test_what_is_changed_after_binding_changes_nothing(
    pods: BoundStore, tmp_path: Path, later: dict[str, object], restart: bool
) -> None:
    pods.apply("ADDED", bound())
    before = pods.only
    if restart:
        pods = BoundStore(tmp_path)
        pods.replace([bound(**later)])
    else:
        pods.apply("MODIFIED", bound(**later))
    after = pods.only
    assert (after.fraction, after.memory_mib, after.groups) == ("0.5", "", ("g1",))
    assert (after.facts.requests, after.facts.queue_ref) == ({"fake.gputally.dev/fraction": "0.5"}, "fake:vision")
    assert (before.fraction, before.groups) == (after.fraction, after.groups)


@pytest.mark.parametrize(("changes", "groups", "fraction"), [
    ([{"labels": {}}, *({"labels": {"fake.gputally.dev/gpu-group": group}} for group in ("g1", "g2"))], ("g1",), "0.5"),
    ([{"labels": {}, "annotations": {}}, {}], (), ""),
    ([{"spec": {"nodeName": ""}}, {"annotations": {"fake.gputally.dev/fraction": "0.25"}}], ("g1",), "0.25"),
], ids=["the first group counts", "without a part no group", "not bound yet"])  # fmt: skip
def test_the_group_and_the_part_of_a_pod(
    pods: BoundStore, changes: list[dict[str, Any]], groups: tuple[str, ...], fraction: str
) -> None:
    for changed in changes:
        pods.apply("MODIFIED", bound(**changed))
    assert (pods.only.groups, pods.only.fraction) == (groups, fraction)


def test_pods_that_are_gone_are_forgotten(pods: BoundStore, tmp_path: Path) -> None:
    pods.apply("ADDED", bound())
    pods.apply("DELETED", bound())
    assert UID not in (tmp_path / BOUND_PODS_FILE).read_text()
    pods.apply("ADDED", bound())
    pods.replace([])
    assert UID not in (tmp_path / BOUND_PODS_FILE).read_text()


def test_a_file_that_cannot_be_read_is_said_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / BOUND_PODS_FILE).write_text("{")
    pods = BoundStore(tmp_path)
    assert str(tmp_path / BOUND_PODS_FILE) in str([record.__dict__ for record in caplog.records])
    pods.apply("ADDED", bound())
    assert UID in (tmp_path / BOUND_PODS_FILE).read_text()


PAGE_ONE = b'{"metadata": {"resourceVersion": "5", "continue": "more"}}'


class Lists:
    """An API whose lists have a second page, which it refuses; `line`: what each watch sends before it says 410."""

    def __init__(self, second: ApiUnavailable | None, line: bytes = b"") -> None:
        self.second = second
        self.line = line

    def page(self, path: str, parameters: Mapping[str, str]) -> bytes:
        if self.second is None:
            return b'{"metadata": {"resourceVersion": "5"}}'
        if "continue" in parameters:
            raise self.second
        return PAGE_ONE

    def lines(self, path: str, parameters: Mapping[str, str], timeout_s: float) -> Iterator[bytes]:
        yield self.line
        yield b'{"type": "ERROR", "object": {"code": 410, "message": "too old"}}'


BOOKMARK = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}'


@pytest.mark.parametrize("api", [Lists(ApiUnavailable("gone", 410)), Lists(None, BOOKMARK)], ids=["page", "watch"])
def test_a_version_that_is_always_too_old_backs_off_and_is_named(
    store: PodStore, clock: VirtualClock, api: Lists, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the second page of the list says so, or a watch that first sends something."""
    reflector, pauses = LeanReflector(api, PODS, "x=y", store, clock, half), []
    for _ in range(8):
        pauses.append(reflector.step())
        clock.advance(pauses[-1])
    assert pauses == [0, 1_500, 3_000, 6_000, 12_000, 24_000, 45_000, 45_000]
    assert reflector.failure
    assert any("watching the API server fails" in record.message for record in caplog.records)


def test_a_list_that_names_its_own_page_as_the_next_one_ends(store: PodStore, clock: VirtualClock) -> None:
    class Endless(Lists):
        def page(self, path: str, parameters: Mapping[str, str]) -> bytes:
            return PAGE_ONE

    reflector = LeanReflector(Endless(None), PODS, "x=y", store, clock, half)
    assert reflector.step() > 0
    assert "does not go on" in reflector.failure


def test_watches_that_end_at_once_after_a_line_follow_with_pauses(store: PodStore, clock: VirtualClock) -> None:
    reflector = LeanReflector(scripted(BOOKMARK), PODS, "x=y", store, clock, half)
    assert [reflector.step() for _ in range(3)] == [1_000] * 3
    assert reflector.failure == ""
