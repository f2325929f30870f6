"""Scraped data of a cluster: labels of both generations, pods that start and end, devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accountant.history_import.gpu_assignment import TimeGrid, rows
from accountant.history_import.kubernetes_history import histories
from accountant.history_import.prometheus_series import Observed, Series, device_of, labelled_pod, pod_of, resource
from accountant.history_import.prometheus_source import selector

MINUTE = 60_000
START = 1_790_812_800_000
CELLS = 60
SPAN = (START, START + CELLS * MINUTE)
GRID = TimeGrid(*SPAN, MINUTE)
MODEL = "NVIDIA H100 80GB HBM3"
PRODUCT = "NVIDIA-A100-SXM4-80GB"


def series(labels, first=0, last=CELLS - 1, value=1.0, cells=None):
    chosen = range(first, last + 1) if cells is None else cells
    return Series(labels, [START + (cell + 1) * MINUTE for cell in chosen], [value for _ in chosen])


def request(pod, first=0, last=CELLS - 1, *, node="n1", count=1, kind="nvidia_com_gpu", **labels):
    named = {"namespace": "vision", "pod": pod, "uid": f"uid-{pod}", "container": "main"}
    return series({**named, "node": node, "resource": kind, **labels}, first, last, float(count))


def gpu(index=0, first=0, last=CELLS - 1, value=0.5, pod="", **labels):
    named = {"UUID": f"GPU-{index}", "gpu": str(index), "modelName": MODEL, "Hostname": "n1"}
    of_pod = {"pod": pod, "namespace": "vision", "container": "main"} if pod else {}
    return series({**named, **of_pod, **labels}, first, last, value)


def seen(*, nodes=("n1",), **changes):
    listed = tuple(series({"node": node}) for node in nodes)
    return Observed(GRID, MINUTE, MINUTE, **({"nodes": listed} | changes))


def held(observed, **options):
    """Return minutes by (pod, GPU) over all nodes, and the total capacity."""
    minutes, capacity = {}, 0
    for node in histories(observed, **options):
        for one in node.gpus:
            for row in rows(one, node.holds.get(one.uuid, ()), SPAN, [SPAN]):
                capacity += row.capacity_us
                if row.holder is not None and row.holder.kind == "pod":
                    key = (row.holder.name, one.uuid)
                    minutes[key] = minutes.get(key, 0) + row.allocated_us / 60_000_000
    return minutes, capacity / 60_000_000


def test_labels_of_every_generation():
    assert pod_of({"exported_pod": "a", "exported_namespace": "x", "pod": "ksm", "namespace": "mon"}) == ("x", "a")
    assert pod_of({"pod_name": "a", "pod_namespace": "x"}) == ("x", "a")
    assert device_of({"uuid": "GPU-1", "GPU_I_ID": "7"}) == ("GPU-1", 7)
    assert device_of({"UUID": "GPU-1", "GPU_I_ID": ""}) == ("GPU-1", None)
    assert device_of({"gpu": "0"}) is None
    idle = {"pod": "nvidia-dcgm-exporter-x", "namespace": "gpu-operator", "container": "dcgm"}
    assert labelled_pod(idle) is None
    assert labelled_pod(idle | {"exported_pod": "a", "exported_namespace": "x"}) == ("x", "a")
    assert labelled_pod({"pod": "a", "namespace": "x"}) == ("x", "a")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nvidia_com_gpu", "nvidia.com/gpu"),
        ("nvidia.com/gpu", "nvidia.com/gpu"),
        ("nvidia_com_gpu_shared", "nvidia.com/gpu.shared"),
        ("nvidia_com_mig_1g_10gb", "nvidia.com/mig-1g.10gb"),
        ("nvidia_com_mig_1g_10gb_me", "nvidia.com/mig-1g.10gb.me"),
        ("nvidia_com_mig_1c_3g_40gb", "nvidia.com/mig-1c.3g.40gb"),
        ("cpu", ""),
    ],
)
def test_resources(text, name):
    assert resource(text) == name


def test_a_pod_holds_what_its_label_says_and_the_rest_is_nobodys():
    busy = (gpu(0), gpu(1, 0, 9), gpu(1, 10, 19, pod="a"), gpu(1, 20))
    assert held(seen(requests=(request("a", 10, 19),), busy=busy)) == ({("a", "GPU-1"): 10}, 120)


def test_requests_without_a_label_take_a_free_gpu_that_nobody_else_is_labelled_with():
    observed = seen(requests=(request("a"), request("b")), busy=(gpu(0, pod="b"), gpu(1)))
    assert held(observed)[0] == {("a", "GPU-1"): 60, ("b", "GPU-0"): 60}


def test_a_pod_that_is_over_holds_nothing_although_it_is_listed():
    over = series({"namespace": "vision", "pod": "a", "uid": "uid-a", "phase": "Succeeded"}, 30)
    minutes, _ = held(seen(requests=(request("a"),), over=(over,), busy=(gpu(0),)))
    assert minutes == {("a", "GPU-0"): 30}
    exact = ({"namespace": "vision", "pod": "a", "uid": "uid-a"}, START / 1000 + 29.5 * 60)
    minutes, _ = held(seen(requests=(request("a"),), over=(over,), ends=(exact,), busy=(gpu(0),)))
    assert minutes == {("a", "GPU-0"): 29.5}


def test_a_pod_that_waits_holds_nothing():
    assert held(seen(requests=(request("a", node=""),), busy=(gpu(0),))) == ({}, 60)


def test_while_nobody_scraped_a_pod_that_was_there_before_and_after_was_there():
    heard = [*range(20), *range(40, CELLS)]
    labels = request("a").labels
    observed = seen(nodes=(), requests=(series(labels, cells=heard),), busy=(gpu(0, value=0.2, pod="a"), gpu(1)))
    observed = replace(observed, nodes=(series({"node": "n1"}, cells=heard),))
    # Of the other GPU nobody knows for 20 minutes whether it was held: they are unmetered.
    assert held(observed) == ({("a", "GPU-0"): 60}, 60 + 40)
    (node,) = histories(observed)
    assert node.blind["GPU-1"] == ((START + 20 * MINUTE, START + 40 * MINUTE),)


def test_time_slicing_is_told_by_what_the_node_offers():
    offered = (({"node": "n1", "resource": "nvidia_com_gpu"}, 4.0),)
    minutes, capacity = held(seen(requests=(request("a"), request("b", 0, 29)), allocatable=offered, busy=(gpu(0),)))
    assert (minutes, capacity) == ({("a", "GPU-0"): 15, ("b", "GPU-0"): 7.5}, 60)
    # Four GPUs' worth on one is all there is: a fifth is counted, and never held.
    asked = tuple(request(name) for name in "abcde")
    (node,) = histories(seen(requests=asked, allocatable=offered, busy=(gpu(0),)))
    assert (len(node.holds["GPU-0"]), node.unplaced_us) == (4, 3_600_000_000)


def test_a_node_of_whole_shared_and_partitioned_gpus():
    offered = tuple(
        ({"node": "n1", "resource": name}, count)
        for name, count in (("nvidia_com_gpu", 1.0), ("nvidia_com_gpu_shared", 4.0), ("nvidia_com_mig_3g_40gb", 1.0))
    )
    instance = {"GPU_I_ID": "1", "GPU_I_PROFILE": "3g.40gb"}
    observed = seen(
        requests=(
            request("w"), request("s", kind="nvidia_com_gpu_shared"), request("m", kind="nvidia_com_mig_3g_40gb"),
        ),
        allocatable=offered,
        busy=(gpu(0), gpu(1, pod="w"), gpu(2, **instance)),
    )  # fmt: skip
    minutes, capacity = held(observed)
    assert minutes == {("w", "GPU-1"): 60, ("s", "GPU-0"): 15, ("m", "GPU-2"): pytest.approx(60 * 3 / 7)}
    assert capacity == 180


def test_without_kube_state_metrics_a_labelled_gpu_is_a_held_one():
    exporter = {"pod": "dcgm-exporter-1", "namespace": "gpu", "container": "exporter"}
    observed = seen(nodes=(), busy=(gpu(0, 0, 29, pod="a"), gpu(0, 30, 44, **exporter), gpu(1, 0, 44)))
    minutes, capacity = held(observed)
    assert minutes == {("a", "GPU-0"): 30}
    assert capacity == 90
    (node,) = histories(observed)
    assert node.blind["GPU-1"] == ((START + 45 * MINUTE, SPAN[1]),)
    assert [fact.uid for fact in node.facts] == ["imported:vision/a"]


def test_without_an_exporter_a_node_has_what_it_offers():
    offered = (
        ({"node": "n1", "resource": "nvidia_com_gpu"}, 4.0),
        ({"node": "n1", "resource": "nvidia_com_mig_3g_40gb"}, 3.0),
    )
    about = ({"node": "n1", "label_nvidia_com_gpu_product": PRODUCT, "label_nvidia_com_gpu_replicas": "2"},)
    observed = seen(requests=(request("a"),), allocatable=offered, node_labels=about)
    assert held(observed) == ({("a", "imported:n1/0"): 30}, 4 * 60)
    (node,) = histories(observed)
    assert [len(one.parts) for one in node.gpus] == [1, 1, 2, 1]
    assert {one.model for one in node.gpus} == {PRODUCT}


def test_facts_name_queue_owner_and_labels_under_the_usual_rules():
    mine = {"namespace": "vision", "pod": "a", "uid": "uid-a"}
    observed = seen(
        requests=(request("a", count=2),),
        busy=(gpu(0), gpu(1)),
        pods=({**mine, "node": "n1", "created_by_kind": "ReplicaSet", "created_by_name": "web-1"},),
        owners=({**mine, "owner_kind": "ReplicaSet", "owner_name": "web-1", "owner_is_controller": "true"},),
        upper_owners=({"namespace": "vision", "replicaset": "web-1", "owner_kind": "Deployment", "owner_name": "web"},),
        pod_labels=({**mine, "label_kai_scheduler_queue": "vision", "label_team": "cv", "label_secret": "x"},),
        starts=((mine, START / 1000 - 5),),
    )
    (node,) = histories(observed, scheduler="kai-scheduler", team_labels=("team",))
    (fact,) = node.facts
    assert (fact.workload, fact.queue_ref, fact.requests) == ("Deployment/web", "kai:vision", {"nvidia.com/gpu": "2"})
    assert (fact.labels, fact.scheduled_ms, fact.observed_ms) == ({"team": "cv"}, START - 5_000, SPAN[1])
    (unplaced,) = histories(observed)[0].facts
    assert (unplaced.queue_ref, unplaced.labels) == ("", {})


def test_a_node_is_the_one_kubernetes_knows():
    labels = {"Hostname": "exporter-pod-7", "instance": "10.0.0.7:9400", "pod": "dcgm-exporter-7", "namespace": "gpu"}
    where = ({"namespace": "gpu", "pod": "dcgm-exporter-7", "uid": "u", "node": "n1"},)
    (node,) = histories(seen(busy=(gpu(0, **labels),), pods=where))
    assert node.node == "n1"


def test_selectors():
    assert selector("up", "", "") == "up"
    assert selector("up", 'a="b"', 'cluster="prod"') == 'up{a="b",cluster="prod"}'
    assert selector("", 'a="b"', "") == '{a="b"}'
