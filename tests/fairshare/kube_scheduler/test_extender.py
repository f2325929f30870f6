"""The extender's JSON as the kube-scheduler writes and reads it, its limits, and its view of the cluster.

Field names are Go's, capitalised: k8s.io/kube-scheduler/extender/v1 has no JSON tags."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.extender_views import ExtenderViews
from fairshare.core.gpu_demand import gpus_taken, read_pod
from fairshare.core.queues_and_weights import Pod
from fairshare.http_server import serve_extender
from fairshare.schedulers.kube_scheduler.extender import (
    ASSUME_MS,
    MOST_NODES,
    KubeSchedulerExtender,
    NodeScores,
    fair_nodes,
)
from fairshare.targets.extender import BadRequest, ExtenderView, QueueShare, sides_of
from fairshare.targets.pod_index import PodIndex, Sides
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import GPU, POD
from gputally.server.https_server import BadCertificate, Tls, TlsFiles
from tests.fairshare.builders import cluster_with, node_object, pod_object, policy_of
from tests.fairshare.conftest import Make
from tests.fairshare.kube_scheduler.node_scores import scores

NODES = {"n1": 8.0, "n2": 8.0, "n3": 8.0}


def _pod(uid: str, gpus: float, *, node: str = "", ref: str = "", gang: str = "") -> Pod:
    return Pod(uid, "ns", uid, gpus, node=node, ref=ref, gang=gang, held=bool(node))


def _indexed(pods: Iterable[Pod]) -> PodIndex:
    index = PodIndex()
    for pod in pods:
        index.change(pod.uid, pod)
    return index


def _room(*pods: Pod, **shares: QueueShare) -> ExtenderView:
    queues = {name: name for name in shares}
    return ExtenderView(NODES, _indexed(pods), shares, queues, sides_of(shares, queues))


def _object(uid: str, gpus: int = 2) -> dict[str, Any]:
    limits = {GPU: str(gpus)}
    spec = {"containers": [{"name": "c", "resources": {"limits": limits}}]}
    return {"metadata": {"name": uid, "namespace": "ns", "uid": uid}, "spec": spec, "status": {"phase": "Pending"}}


def _args(uid: str = "new", gpus: int = 2, **more: Any) -> bytes:
    """Build ExtenderArgs with nodeCacheCapable: true."""
    return json.dumps({"Pod": _object(uid, gpus), "Nodes": None, "NodeNames": list(NODES), **more}).encode()


def test_best_fit_leaves_whole_nodes_whole() -> None:
    room = _room(_pod("a", 4, node="n1"), _pod("b", 6, node="n2"))
    scored = scores(_pod("new", 2), list(NODES), room)
    assert scored["n2"] > scored["n1"] > scored["n3"]
    assert scores(_pod("new", 4), list(NODES), room)["n2"] == 0  # it does not fit there
    assert scores(_pod("new", 0), list(NODES), room) == dict.fromkeys(NODES, 0)


def test_borrowed_pods_gather_and_the_rest_keep_away_from_them() -> None:
    room = _room(
        _pod("a", 4, node="n1", ref="over"), _pod("b", 4, node="n2", ref="within"),
        over=QueueShare(8, 4), within=QueueShare(4, 8),
    )  # fmt: skip
    borrowing = scores(_pod("new", 2, ref="over"), list(NODES), room)
    entitled = scores(_pod("new", 2, ref="within"), list(NODES), room)
    assert borrowing["n1"] > borrowing["n2"]
    assert entitled["n2"] > entitled["n1"]


@given(
    st.lists(st.tuples(st.sampled_from(sorted(NODES)), st.floats(0, 8)), max_size=12),
    st.floats(0.1, 16),
    st.randoms(use_true_random=False),
)
def test_scores_keep_their_range_in_any_order(placed: list[tuple[str, float]], gpus: float, chance: Any) -> None:
    pods = [_pod(str(i), amount, node=node) for i, (node, amount) in enumerate(placed)]
    first = scores(_pod("new", gpus), list(NODES), _room(*pods))
    assert all(0 <= score <= 10 for score in first.values())
    chance.shuffle(pods)
    assert scores(_pod("new", gpus), sorted(NODES, reverse=True), _room(*pods)) == first


def test_a_neighbor_that_requests_no_gpu_is_no_company() -> None:
    """A pod that requests GPU memory has no GPUs until KAI's part of it is computed."""
    room = _room(_pod("a", 0, node="n1", ref="over"), over=QueueShare(8, 4))
    scored = scores(_pod("new", 2, ref="over"), list(NODES), room)
    assert scored["n1"] == scored["n2"]


CHANGES = st.lists(
    st.tuples(
        st.sampled_from("pqrstu"),
        st.none()
        | st.builds(
            lambda node, gpus, ref, gang, leaving, kind: Pod(
                "", "ns", "", gpus, node=node, ref=ref, gang=gang, held=bool(node) and not leaving,
                keeps=kind == 1, shares=kind == 2,
            ),
            st.sampled_from(["", *NODES]), st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5]),
            st.sampled_from(["", "policy:a", "policy:b", "fake:a"]), st.sampled_from(["", "g", "h"]),
            st.booleans(), st.integers(0, 3),
        ),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=100)
@given(CHANGES)
def test_after_any_changes_the_index_says_what_the_pods_say(changes: list[tuple[str, Pod | None]]) -> None:
    index, now = PodIndex(), dict[str, Pod]()
    shares = {"a": QueueShare(2, 1), "b": QueueShare(1, 2)}
    queues = {"policy:a": "a", "policy:b": "b", "fake:a": "a"}
    view = ExtenderView(NODES, index, shares, queues, sides_of(shares, queues))
    kept, asking = NodeScores(list(NODES), view), [Pod(uid, "ns", uid, 1.0, ref="policy:a") for uid in ("p", "u", "x")]
    for uid, pod in changes:
        for new in asking:
            kept.of(new, view)  # the scores that it keeps are those of before the change
        index.pods()  # a reader between the changes keeps nothing old
        index.on_node("n1").occupancy(Sides())
        if pod is None:
            now.pop(uid, None)
            index.change(uid, None)
        else:
            now[uid] = replace(pod, uid=uid, name=uid)
            index.change(uid, now[uid])
    assert index.pods() == tuple(now[uid] for uid in sorted(now))
    for node in NODES:
        there = [pod for pod in now.values() if pod.node == node]
        sides = Sides(frozenset({"policy:a", "fake:a"}), frozenset({"policy:b"}))
        _, taken, over, within = index.on_node(node).occupancy(sides)
        requested = fsum(pod.gpus for pod in there)
        parts = [fsum(pod.gpus for pod in there if pod.ref in refs) for refs in (sides.over, sides.within)]
        assert taken == gpus_taken(there)
        assert [over, within] == ([part / requested for part in parts] if requested else [None, None])
    for gang in "gh":
        members = [pod for pod in now.values() if pod.gang == gang]
        held = fsum(pod.gpus for pod in members if pod.held)
        assert index.held_by_gang(gang) == (held if members else None)
    for ref in ("policy:a", "fake:a"):
        assert index.held_by_ref([ref]) == [fsum(pod.gpus for pod in now.values() if pod.held and pod.ref == ref)]
    demanding = {uid for uid, pod in now.items() if pod.gpus and pod.ref.startswith("policy:") and not pod.leaving}
    assert index.demanding_besides(frozenset("p")).keys() == demanding - {"p"}
    anew = replace(view, pods=_indexed(now.values()))
    for new in asking:
        assert kept.of(new, view) == NodeScores(list(NODES), anew).of(new, anew)


def test_only_who_is_above_his_share_is_a_victim_of_others() -> None:
    room = _room(
        _pod("v1", 4, node="n1", ref="over"), _pod("v2", 4, node="n2", ref="within"), _pod("v3", 4, node="n3"),
        over=QueueShare(8, 4), within=QueueShare(4, 8), mine=QueueShare(0, 8),
    )  # fmt: skip
    victims = {"n1": ["v1"], "n2": ["v2"], "n3": ["v3"]}
    assert fair_nodes(_pod("new", 4, ref="mine"), victims, room) == ("n1", "n3")
    assert fair_nodes(_pod("new", 4, ref="within"), victims, room) == ("n1", "n2", "n3")  # its own queue
    assert fair_nodes(_pod("new", 16, ref="mine"), victims, room) == ("n3",)  # it would be above its own share
    assert fair_nodes(_pod("new", 4, ref="mine"), victims, _room()) == ("n1", "n2", "n3")  # nothing known


def test_a_victim_costs_its_whole_gang() -> None:
    room = _room(
        _pod("g1", 2, node="n1", ref="over", gang="G"), _pod("g2", 6, node="n3", ref="over", gang="G"),
        _pod("s", 4, node="n2", ref="over"),
        over=QueueShare(12, 0), mine=QueueShare(0, 8),
    )  # fmt: skip
    assert fair_nodes(_pod("new", 2, ref="mine"), {"n1": ["g1"], "n2": ["s"]}, room) == ("n2",)


def test_a_burst_counts_the_pods_placed_just_before(clock: VirtualClock) -> None:
    extender = KubeSchedulerExtender(_room, clock)
    chosen = []
    for i in range(5):
        answer = msgspec.to_builtins(extender.prioritize(_args(f"p{i}", 2)).body)
        assert [set(each) for each in answer] == [{"Host", "Score"}] * 3
        chosen.append(max(answer, key=lambda each: (each["Score"], each["Host"]))["Host"])
    assert chosen[:4] == [chosen[0]] * 4  # one node fills up
    assert chosen[4] != chosen[0]
    clock.advance(ASSUME_MS + 1)
    later = extender.prioritize(_args("later", 2)).body
    assert (
        later == KubeSchedulerExtender(_room, clock).prioritize(_args("later", 2)).body
    )  # what never came true is forgotten


def test_whole_nodes_and_whole_victims_are_read_too(clock: VirtualClock) -> None:
    """With nodeCacheCapable: false."""
    items = [{"metadata": {"name": n}, "status": {"allocatable": {GPU: "4"}}} for n in ("x", "y")]
    extender = KubeSchedulerExtender(lambda: _room(_pod("a", 2, node="x")), clock)
    body = json.dumps({"Pod": _object("new"), "Nodes": {"items": items}, "NodeNames": None}).encode()
    found = {each.host: each.score for each in extender.prioritize(body).body}
    assert found["x"] > found["y"]
    room = _room(_pod("v", 4, node="n1", ref="within"), within=QueueShare(4, 8))
    victims = {"n1": {"Pods": [_object("v")], "NumPDBViolations": 1}, "n2": {"Pods": [_object("w")]}}
    body = json.dumps({"Pod": _object("new"), "NodeNameToVictims": victims, "NodeNameToMetaVictims": None}).encode()
    assert KubeSchedulerExtender(lambda: room, clock).preempt(body).body == {
        "NodeNameToMetaVictims": {"n2": {"Pods": [{"UID": "w"}], "NumPDBViolations": 0}}
    }
    body = json.dumps({"Pod": _object("new"), "NodeNameToMetaVictims": {"n1": None}}).encode()
    assert KubeSchedulerExtender(lambda: None, clock).preempt(body).body == {
        "NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}
    }


def test_who_knows_nothing_decides_nothing(clock: VirtualClock) -> None:
    extender = KubeSchedulerExtender(lambda: None, clock)
    assert {each.score for each in extender.prioritize(_args()).body} == {0}
    victims = {"n1": {"Pods": [{"UID": "v"}], "NumPDBViolations": 2}}
    body = json.dumps({"Pod": _object("new"), "NodeNameToMetaVictims": victims}).encode()
    assert extender.preempt(body).body == {"NodeNameToMetaVictims": victims}


def test_an_answer_that_takes_too_long_is_given_unfinished(clock: VirtualClock) -> None:
    def room() -> ExtenderView:
        clock.advance(301)
        return _room()

    answer = KubeSchedulerExtender(room, clock).prioritize(_args())
    assert answer.late
    assert [each.score for each in answer.body] == [0, 0, 0]


def _bent(name: str, key: str, value: str) -> bytes:
    """Build a pod with one number or text that no API server would send."""
    pod = _object(name)
    (pod["metadata"] if key == "uid" else pod["spec"])[key] = "bent"
    return json.dumps({"Pod": pod, "NodeNames": ["n"]}).replace('"bent"', value).encode()


@pytest.mark.parametrize("victims", ['[{"UID": ["u"]}]', '[{"UID": "u"}], "NumPDBViolations": 1e999', "3"])
def test_victims_that_are_none_are_refused_in_words(clock: VirtualClock, victims: str) -> None:
    pod = json.dumps(_object("x"))
    body = f'{{"Pod": {pod}, "NodeNameToMetaVictims": {{"n": {{"Pods": {victims}}}}}}}'
    with pytest.raises(BadRequest, match=r"victims: a field is missing or has the wrong type|Number out of range"):
        KubeSchedulerExtender(_room, clock).preempt(body.encode())


WRONG = "a field is missing or has the wrong type"
ODD = {**_object("x"), "metadata": {"name": "a\nb", "ownerReferences": [{"controller": True}]}}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "the body is not JSON"),
        (b'{"Pod": {}, "NodeNames": ["\\ud800"]}', "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b"{}", "Pod is missing"),
        (json.dumps({"Pod": _object("x")}).encode(), "neither Nodes nor a list"),
        (json.dumps({"Pod": _object("x"), "NodeNames": [1]}).encode(), "neither Nodes nor a list"),
        (json.dumps({"Pod": _object("x"), "NodeNames": ["n"] * (MOST_NODES + 1)}).encode(), "more than"),
        (json.dumps({"Pod": {"metadata": {"name": "x"}, "spec": {"containers": [3]}}}).encode(), "Pod x: a field is"),
        (
            json.dumps({"Pod": _object("x"), "Nodes": {"items": [{}]}}).encode(),
            rf"^Nodes: {WRONG} \(KeyError: 'metadata'\)$",
        ),
        (b"[" * 100_000, "the body is not JSON"),
        (_bent("x", "priority", "1e999"), "the body is not JSON: Number out of range"),
        (_bent("x", "uid", "[]"), "Pod x: metadata.uid is not a string"),
        (_bent("x", "priority", '"high"'), rf"Pod x: {WRONG} \(ValueError: invalid literal for int\(\)"),
        (json.dumps({"Pod": ODD}).encode(), rf"^Pod a\\x0ab: {WRONG} \(KeyError: 'kind'\)$"),
    ],
)
def test_what_is_no_question_is_refused_in_words(clock: VirtualClock, body: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        KubeSchedulerExtender(_room, clock).prioritize(body)


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["Pod", "metadata", "name", "spec", "containers", "NodeNames", "Nodes", "items",
                         "NodeNameToMetaVictims", "Pods", "UID", "resources", "limits", GPU]), inner, max_size=4),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_body_breaks_it(body: bytes) -> None:
    extender = KubeSchedulerExtender(_room, VirtualClock(0))
    for verb in (extender.prioritize, extender.preempt):
        with contextlib.suppress(BadRequest):
            msgspec.json.encode(verb(body).body)


Served = tuple[http.client.HTTPConnection, list[tuple[str, str]]]


@pytest.fixture
def served(clock: VirtualClock) -> Iterator[Served]:
    """A connection to the extender, and the verbs and results that it reports."""
    results: list[tuple[str, str]] = []
    extender = KubeSchedulerExtender(_room, clock)
    with serve_extender(
        "127.0.0.1", 0, extender.routes, answered=lambda verb, _, result: results.append((verb, result))
    ) as url:
        parts = urlsplit(url)
        with contextlib.closing(http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=5)) as connection:
            yield connection, results


def _post(connection: http.client.HTTPConnection, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_the_extender_answers_under_names_that_no_stranger_can_have(clock: VirtualClock) -> None:
    """A stranger's name can resolve to the extender's address in a browser (DNS rebinding)."""
    hosts = ("scheduling.example.com",)
    with serve_extender("127.0.0.1", 0, KubeSchedulerExtender(_room, clock).routes, hosts=hosts) as url:
        for host, status in (
            ("evil.example.com", 421), ("scheduling.example.com:9403", 200), ("10.1.2.3:9403", 200),
            ("gputally-extender.gputally.svc:9403", 200),
        ):  # fmt: skip
            answer = httpx2.post(url + "/scheduler/prioritize", content=_args(), headers={"Host": host})
            assert answer.status_code == status, host


def test_over_http_with_one_connection_for_many_questions(served: Served) -> None:
    connection, results = served
    status, answer = _post(connection, "/scheduler/prioritize", _args())
    assert (status, len(answer)) == (200, 3)
    status, answer = _post(connection, "/scheduler/preempt", json.dumps({"Pod": _object("x")}).encode())
    assert (status, answer) == (200, {"NodeNameToMetaVictims": {}})
    assert _post(connection, "/scheduler/prioritize", b"{}")[0] == 400
    assert results == [("prioritize", "ok"), ("preempt", "ok"), ("prioritize", "refused")]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/scheduler/filter", {}, 404),
        ("/metrics", {}, 404),
        ("/scheduler/preempt", {"Content-Length": "999999999"}, 413),
        ("/scheduler/preempt", {"Content-Length": "many"}, 400),
        ("/scheduler/preempt", {"Content-Length": "²"}, 400),
    ],
)
def test_over_http_the_rest_is_refused(served: Served, path: str, headers: dict[str, str], status: int) -> None:
    connection, _ = served
    connection.putrequest("POST", path)
    for name, value in headers.items() or {"Content-Length": "0"}.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == status


def test_a_body_that_does_not_come_is_not_waited_for(served: Served) -> None:
    connection, _ = served
    connection.putrequest("POST", "/scheduler/prioritize")
    connection.putheader("Content-Length", "100")
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, json.load(answer)) == (408, {"Error": "the body did not arrive within 1 s"})
    assert answer.getheader("Connection") == "close"


def _paths(folder: Path) -> dict[str, Path]:
    return {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}


def _issue(authority: trustme.CA, paths: dict[str, Path]) -> bytes:
    """Write a new certificate of the extender with its key, and return it in DER."""
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(paths["cert"])
    issued.private_key_pem.write_to_path(paths["key"])
    return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())


def test_with_tls_only_the_scheduler_is_answered(clock: VirtualClock, tmp_path: Path) -> None:
    authority, paths = trustme.CA(), _paths(tmp_path)
    scheduler = authority.issue_cert("kube-scheduler")
    authority.cert_pem.write_to_path(paths["ca"])
    _issue(authority, paths)
    tls = Tls(TlsFiles(paths["cert"], paths["key"], paths["ca"], clients_required=True))
    with serve_extender("127.0.0.1", 0, KubeSchedulerExtender(_room, clock).routes, tls=tls) as url:
        parts = urlsplit(url)
        assert parts.scheme == "https"
        trusted = ssl.create_default_context(cafile=str(paths["ca"]))
        stranger = http.client.HTTPSConnection(str(parts.hostname), int(parts.port or 0), timeout=5, context=trusted)
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            _post(stranger, "/scheduler/prioritize", _args())
        known = ssl.create_default_context(cafile=str(paths["ca"]))
        scheduler.configure_cert(known)
        connection = http.client.HTTPSConnection(str(parts.hostname), int(parts.port or 0), timeout=5, context=known)
        assert _post(connection, "/scheduler/prioritize", _args())[0] == 200
        connection.close()
        stranger.close()
    with pytest.raises(BadCertificate, match=r"none\.pem"):
        Tls(TlsFiles(tmp_path / "none.pem", paths["key"]))


def test_a_certificate_is_renewed_for_the_next_connection_but_not_by_half(clock: VirtualClock, tmp_path: Path) -> None:
    authority, paths = trustme.CA(), _paths(tmp_path)
    authority.cert_pem.write_to_path(paths["ca"])

    def shown(url: str) -> bytes:
        parts = urlsplit(url)
        trusted = ssl.create_default_context(cafile=str(paths["ca"]))
        with (
            socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=5) as plain,
            trusted.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            return secure.getpeercert(binary_form=True) or b""

    first = _issue(authority, paths)
    tls = Tls(TlsFiles(paths["cert"], paths["key"]))
    with serve_extender("127.0.0.1", 0, KubeSchedulerExtender(_room, clock).routes, tls=tls) as url:
        assert shown(url) == first
        paths["key"].write_text("half a renewal")
        assert shown(url) == first
        second = _issue(authority, paths)
        assert shown(url) == second != first


QUEUES = [{"name": name, "deserved": 4, "refs": [f"policy:{name}"]} for name in "ab"]


def _pods(cluster: MemoryCluster) -> Sequence[Pod]:
    return tuple(pod for obj in cluster.list(POD) if (pod := read_pod(obj)) is not None)


@pytest.fixture
def seen(clock: VirtualClock, controller_of: Make) -> tuple[PodIndex, ExtenderViews]:
    """Queue a holds all 8 GPUs with a quota of 4; b requested nothing in the last cycle."""
    cluster = cluster_with(node_object("n0", 8), pod_object("a0"), pod_object("a1"))
    policy = policy_of(QUEUES)
    view = ExtenderViews(index := _indexed(_pods(cluster)), clock)

    def observe(report: CycleReport) -> None:
        view.observe(report, policy)

    controller_of(policy, cluster, pods=index.pods, observe=observe).cycle()
    return index, view


def _asking(name: str, **fields: Any) -> Pod:
    pod = read_pod(pod_object(name, "b", node="", **fields))
    assert pod is not None
    return pod


@pytest.mark.parametrize("watched", [False, True])
def test_the_first_question_counts_its_own_demand(seen: tuple[PodIndex, ExtenderViews], watched: bool) -> None:
    """b had no share, because it requested nothing; its request now is within its quota."""
    index, view = seen
    if watched:  # the watch may have shown the pod already
        index.change("uid-b0", _asking("b0"))
    room = view.view()
    assert {name: share.due for name, share in room.shares.items()} == {"a": 8.0, "b": 0.0}
    assert fair_nodes(_asking("b0"), {"n0": ["uid-a0"]}, room) == ("n0",)


def test_what_is_above_its_share_stays_refused(seen: tuple[PodIndex, ExtenderViews]) -> None:
    _, view = seen
    room = view.view()
    assert room is not None
    assert fair_nodes(_asking("b0", gpus=8), {"n0": ["uid-a0", "uid-a1"]}, room) == ()


def test_whether_the_scheduler_asks_is_heard(
    clock: VirtualClock, seen: tuple[PodIndex, ExtenderViews], controller_of: Make
) -> None:
    _, view = seen
    extender = KubeSchedulerExtender(view.view, clock)
    loop = controller_of(policy_of(QUEUES), cluster_with(node_object("n0", 8)), acts={"kube-scheduler": extender.acts})

    def said() -> tuple[str, str]:
        conditions = loop.cycle().targets[0].conditions
        (found,) = [condition for condition in conditions if condition.type == "Effective"]
        return found.status, found.reason

    assert said() == ("Unknown", "NoRequests")
    extender.prioritize(b'{"Pod": {"metadata": {"name": "p", "namespace": "ns", "uid": "u"}}, "NodeNames": []}')
    assert said() == ("True", "Asked")
