"""Scraped data of a cluster: labels of both generations, pods that start and end, devices."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qs

import httpx2
import pytest

from accountant.core.record_faults import fact_fault
from accountant.histories.prometheus.chunk_queries import PrometheusFailed, PrometheusHistory, selector
from accountant.histories.prometheus.exporter_series import (
    Observed,
    PrometheusSeries,
    device_of,
    labelled_pod,
    pod_of,
    resource,
    unknown_resource,
)
from accountant.histories.prometheus.pod_history import histories
from accountant.history_import.gpu_assignment import TimeGrid, rows
from accountant.history_import.protocol import Chunk
from gputally.base.prometheus_api import Prometheus
from gputally.base.untrusted_text import is_name
from tests.fake_scheduler import fake_scheduler as fake_scheduler

pytestmark = pytest.mark.usefixtures("fake_scheduler")

MINUTE = 60_000
START = 1_790_812_800_000
CELLS = 60
SPAN = (START, START + CELLS * MINUTE)
GRID = TimeGrid(*SPAN, MINUTE)
MODEL = "NVIDIA H100 80GB HBM3"
PRODUCT = "NVIDIA-A100-SXM4-80GB"


def series(labels, first=0, last=CELLS - 1, value=1.0, cells=None):
    chosen = range(first, last + 1) if cells is None else cells
    return PrometheusSeries(labels, [START + (cell + 1) * MINUTE for cell in chosen], [value for _ in chosen])


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


def test_a_gpu_that_only_an_init_container_requests_is_held_by_its_pod():
    """A sidecar is an init container. If another container requests GPUs, it gets those of the init container."""
    observed = seen(
        devices=tuple(gpu(index).labels for index in range(3)),
        busy=tuple(gpu(index) for index in range(3)),
        requests=(request("b"),),
        init_requests=(request("a", container="one"), request("a", container="two", count=2), request("b")),
        allocatable=(({"node": "n1", "resource": "nvidia_com_gpu"}, 3.0),),
    )
    minutes, capacity = held(observed)
    assert capacity == 3 * 60
    assert {pod: sum(m for (name, _), m in minutes.items() if name == pod) for pod in "ab"} == {"a": 120, "b": 60}


def test_gpus_of_other_plugins_are_named_and_not_counted():
    others = ("k8s_amazonaws_com_vgpu", "amd_com_gpu", "aliyun_com_gpu_mem")
    assert [unknown_resource(name) for name in (*others, "cpu", "nvidia_com_gpu")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert held(seen(devices=(gpu().labels,), busy=(gpu(),), requests=(request("a", kind=others[0]),)))[0] == {}


HOSTILE = ("+Inf", "-Inf", "NaN", "-1", "1e300", "1e12", "9" * 5_000, "what")
NAMED = {
    "UUID": "GPU-1", "gpu": "0", "GPU_I_ID": "", "GPU_I_PROFILE": "", "modelName": MODEL, "node": "n1", "pod": "a",
    "namespace": "vision", "container": "main", "uid": "uid-a", "resource": "nvidia_com_gpu", "Hostname": "n1",
    "label_nvidia_com_gpu_count": "2", "label_nvidia_com_gpu_memory": "81559", "label_nvidia_com_gpu_replicas": "1",
    "label_nvidia_com_gpu_product": PRODUCT,
}  # fmt: skip


def answering(value, labels, odd=""):
    """A Prometheus whose series have these labels and this value; those of metrics with `odd` in their query, and 1
    otherwise, if it is given."""

    def answer(request):
        asked = {key: texts[0] for key, texts in parse_qs(request.content.decode()).items()}
        names = ["DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE", "kube_node_info"]
        series = [labels | {"__name__": name} for name in (names if "count by" in asked["query"] else names[:1])]
        text = value if odd in asked["query"] else "1"
        if "step" in asked:
            times = [at * 60 for at in range(-(-START // 60_000), (START + 3_600_000) // 60_000 + 1)]
            result = [{"metric": one, "values": [[at, text] for at in times]} for one in series]
        else:
            result = [{"metric": one, "value": [START / 1000, text]} for one in series]
        return httpx2.Response(200, json={"status": "success", "data": {"resultType": "vector", "result": result}})

    return PrometheusHistory(
        Prometheus("http://p", PrometheusFailed, transport=httpx2.MockTransport(answer)), team_labels=()
    )


@pytest.mark.parametrize("hidden", [(), ("UUID",)], ids=["exporter", "no exporter"])
def test_no_number_of_a_history_is_too_large_for_the_books(hidden):
    """Sums of infinite requests, negative or enormous samples, and labels of thousands of digits."""
    plain = {key: text for key, text in NAMED.items() if key not in hidden}
    cases = [(text, plain, "") for text in HOSTILE]
    cases += [(text, plain, odd) for text in HOSTILE for odd in ("requests", "FB_USED", "POWER", "start_time", "alloc")]
    cases += [("1", plain | {key: "9" * 5_000}, "") for key in plain]
    chunk = Chunk("import:prometheus:1", *SPAN)
    for value, labels, odd in cases:
        history = answering(value, labels, odd)
        try:
            history.chunk_ms(SPAN[1])
        except PrometheusFailed:
            assert value != "1"
        for node in history.read(chunk):
            assert len(node.gpus) <= 2
            made = [row for one in node.gpus for row in rows(one, node.holds.get(one.uuid, ()), SPAN, [SPAN])]
            assert sum(row.capacity_us for row in made) <= 2 * 3_600_000_000
            assert all((row.memory_mib_s or 0) < 2**40 and (row.energy_uj or 0) < 2**60 for row in made)


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
        ("nvidia.com/mig-1g.24gb-me", "nvidia.com/mig-1g.24gb.me"),
        ("nvidia_com_mig_1g_24gb_me_all", "nvidia.com/mig-1g.24gb.me.all"),
        ("nvidia_com_a100", "nvidia.com/a100"),
        ("nvidia_com_GA102GL_A10", "nvidia.com/GA102GL.A10"),
        ("nvidia_com_pgpu", "nvidia.com/pgpu"),
        ("cpu", ""),
        *(
            (f"nvidia{sep}{name}", "")
            for sep in ("_com_", ".com/")
            for name in (
                "gpumem",
                "gpumem_percentage",
                "gpucores",
                "gpu_memory",
                "priority",
                "hostdev",
                "imex_channel",
                "rdma_shared_device_a",
                "sriov_rdma_vf",
                "mlnx_sriov_rdma",
                "bf3_p0_vfs",
                "resibs2f0",
                "cx6_pool",
                "foo",
            )
        ),
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


def test_a_pod_that_a_user_named_like_the_exporter_holds_its_gpu():
    exporters = [{"pod": f"dcgm-exporter-{n}", "namespace": "gpu", "container": "exporter"} for n in range(2)]
    of_user = {"pod": "my-dcgm-exporter", "namespace": "vision", "container": "dcgm-exporter"}
    busy = (gpu(0, **exporters[0]), gpu(1, Hostname="n2", **exporters[1]), gpu(2, **of_user))
    assert held(seen(nodes=(), busy=busy))[0] == {("my-dcgm-exporter", "GPU-2"): 60}


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


@pytest.mark.parametrize(
    ("suffix", "offered", "kind", "replicas", "minutes", "gpus"),
    [
        ("-MIG-1g.10gb", 14, "nvidia_com_gpu", 1, 60 / 7, 2),
        ("-MIG-3g.40gb", 4, "nvidia_com_gpu", 1, 60 * 3 / 7, 2),
        ("-MIG-1g.10gb-SHARED", 28, "nvidia_com_gpu", 2, 60 / 14, 2),
        ("-MIG-1g.10gb", 28, "nvidia_com_gpu_shared", 2, 60 / 14, 2),
    ],
)
def test_without_an_exporter_the_product_names_the_instances_of_mig_strategy_single(
    suffix, offered, kind, replicas, minutes, gpus
):
    labels = {"label_nvidia_com_gpu_product": PRODUCT + suffix, "label_nvidia_com_gpu_replicas": str(replicas)}
    observed = seen(
        requests=(request("a", kind=kind),), allocatable=(({"node": "n1", "resource": kind}, float(offered)),),
        node_labels=({"node": "n1", **labels},),
    )  # fmt: skip
    found, capacity = held(observed)
    assert (sum(found.values()), capacity) == (pytest.approx(minutes), gpus * 60)
    (node,) = histories(observed)
    assert {one.model for one in node.gpus} == {PRODUCT}


@pytest.mark.parametrize("suffix", ["", "_shared"])
def test_without_an_exporter_a_label_says_how_often_an_instance_is_offered(suffix):
    about = ({"node": "n1", "label_nvidia_com_gpu_product": PRODUCT, "label_nvidia_com_mig_1g_10gb_replicas": "2"},)
    kind = f"nvidia_com_mig_1g_10gb{suffix}"
    offered = (({"node": "n1", "resource": kind}, 14.0),)
    found, capacity = held(seen(requests=(request("a", kind=kind),), allocatable=offered, node_labels=about))
    assert (sum(found.values()), capacity) == (pytest.approx(60 / 14), 60)


def test_instances_of_an_exporter_that_are_offered_as_shared_gpus_are_parts_of_their_gpus():
    """Four instances in four replicas each, under the name of shared GPUs."""
    kind = "nvidia_com_gpu_shared"
    busy = tuple(gpu(0, **A100, GPU_I_ID=str(number), GPU_I_PROFILE="1g.20gb") for number in range(3, 7))
    observed = seen(
        requests=(request("a", kind=kind),), allocatable=(({"node": "n1", "resource": kind}, 16.0),), busy=busy
    )
    assert held(observed) == ({("a", "GPU-0"): pytest.approx(60 / 7 / 4)}, 60)


def test_a_product_that_is_named_shared_is_divided_by_time_slicing():
    about = ({"node": "n1", "label_nvidia_com_gpu_product": f"{PRODUCT}-SHARED"},)
    observed = seen(requests=(request("a"),), allocatable=((OFFERED, 4.0),), node_labels=about, busy=(gpu(0),))
    assert held(observed) == ({("a", "GPU-0"): 15}, 60)


def test_facts_name_queue_owner_and_labels_under_the_usual_rules():
    mine = {"namespace": "vision", "pod": "a", "uid": "uid-a"}
    observed = seen(
        requests=(request("a", count=2),),
        busy=(gpu(0), gpu(1)),
        pods=({**mine, "node": "n1", "created_by_kind": "ReplicaSet", "created_by_name": "web-1"},),
        owners=({**mine, "owner_kind": "ReplicaSet", "owner_name": "web-1", "owner_is_controller": "true"},),
        upper_owners=({"namespace": "vision", "replicaset": "web-1", "owner_kind": "Deployment", "owner_name": "web"},),
        pod_labels=({**mine, "label_fake_gputally_dev_queue": "vision", "label_team": "cv", "label_secret": "x"},),
        starts=((mine, START / 1000 - 5),),
    )
    (node,) = histories(observed, scheduler="fake-scheduler", team_labels=("team",))
    (fact,) = node.facts
    assert (fact.workload, fact.queue_ref, fact.requests) == ("Deployment/web", "fake:vision", {"nvidia.com/gpu": "2"})
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


OFFERED = {"node": "n1", "resource": "nvidia_com_gpu"}
A100 = {"modelName": "NVIDIA A100-SXM4-80GB"}


def limits(pod, **amounts):
    """Build the series of HAMi's limits of a pod."""
    return tuple(request(pod, kind=f"nvidia_com_{name}", count=count) for name, count in amounts.items())


def test_not_every_resource_of_nvidia_is_a_gpu():
    """Two HAMi pods have half a GPU each. What the node offers is the number of HAMi's virtual devices."""
    asked = [one for pod in "ab" for one in (request(pod), *limits(pod, gpumem=40_960, gpucores=50))]
    network = [request("c", kind=f"nvidia_com_{name}", count=8) for name in ("hostdev", "rdma_shared", "imex_channel")]
    observed = seen(requests=(*asked, *network), allocatable=((OFFERED, 10.0),), busy=(gpu(0, **A100),))
    assert held(observed) == ({("a", "GPU-0"): 30, ("b", "GPU-0"): 30}, 60)
    (node,) = histories(observed)
    assert (node.unplaced_us, [fact.requests for fact in node.facts]) == (0, [{"nvidia.com/gpu": "1"}] * 2)


@pytest.mark.parametrize(
    ("amounts", "count", "minutes"),
    [
        ({"gpumem_percentage": 25}, 1, 15),
        ({"gpumem": 8_192, "gpucores": 30}, 1, 18),
        ({"gpumem": 8_192}, 2, 12),
        ({"gpucores": 30}, 1, 60),
        ({"gpumem": 12_345}, 1, 9.06),
    ],
)
def test_the_part_of_a_hami_pod_is_that_of_the_agent(amounts, count, minutes):
    """The larger of memory and cores, and all memory without a limit of it."""
    observed = seen(requests=(request("a", count=count), *limits("a", **amounts)), busy=(gpu(0, **A100),))
    assert sum(held(observed)[0].values()) == pytest.approx(minutes)


EIGHT = tuple(gpu(index, **A100) for index in range(8))
EIGHTY = ((OFFERED, 80.0), ({**OFFERED, "node": "n2"}, 80.0))


@pytest.mark.parametrize(
    ("others", "labels"),
    [
        ((request("b", node="n2"), request("b", node="n2", kind="nvidia_com_gpucores", count=50)), ()),
        ((), ({"node": "n1", "label_nvidia_com_gpu_replicas": "1"},)),
    ],
)
def test_whole_cards_without_limits_are_whole_where_each_card_is_offered_ten_times(others, labels):
    """Limits on another node, or a label that denies time slicing, show that the parts are HAMi's."""
    busy = (*EIGHT, gpu(8, modelName=A100["modelName"], Hostname="n2"))
    observed = seen(
        nodes=("n1", "n2"), requests=(request("a", count=8), *others), allocatable=EIGHTY, busy=busy,
        node_labels=labels,
    )  # fmt: skip
    minutes, capacity = held(observed)
    assert {key: value for key, value in minutes.items() if key[0] == "a"} == {
        ("a", f"GPU-{index}"): 60 for index in range(8)
    }
    assert capacity == 9 * 60


def test_several_parts_that_may_be_whole_cards_are_counted_and_on_no_gpu():
    """Eight of 80 may be eight whole cards of HAMi, or eight tenths of time-sliced ones; a label decides."""
    eight = seen(requests=(request("a", count=8),), allocatable=EIGHTY[:1], busy=EIGHT)
    (node,) = histories(eight)
    assert (held(eight), node.unplaced_us) == (({}, 0), 8 * 3_600_000_000)
    assert node.blind == {f"GPU-{index}": (SPAN,) for index in range(8)}
    sliced = replace(eight, node_labels=({"node": "n1", "label_nvidia_com_gpu_replicas": "10"},))
    assert sum(held(sliced)[0].values()) == 48


@pytest.mark.parametrize(
    ("scheduler", "pods", "minutes"),
    [
        ("", "a", None),
        ("", "ab", None),
        ("", "abc", 3 * 6),
        ("gpu-scheduler", "a", None),
        ("default-scheduler", "a", 6),
        ("hami-scheduler", "ab", 120),
    ],
)
def test_one_part_without_evidence_of_time_slicing_is_counted_and_on_no_gpu(scheduler, pods, minutes):
    """One of 20 may be a whole card of HAMi, or a tenth of a time-sliced one: more pods than cards at once, or the
    scheduler that placed them, shows which."""
    placed = tuple({"namespace": "vision", "pod": pod, "uid": f"uid-{pod}", "name": scheduler} for pod in pods)
    observed = seen(
        requests=tuple(request(pod) for pod in pods), allocatable=((OFFERED, 20.0),), busy=EIGHT[:2],
        schedulers=placed if scheduler else (),
    )  # fmt: skip
    (node,) = histories(observed)
    if minutes is None:
        assert (held(observed), node.unplaced_us) == (({}, 0), len(pods) * 3_600_000_000)
        assert node.blind == {"GPU-0": (SPAN,), "GPU-1": (SPAN,)}
    else:
        assert sum(held(observed)[0].values()) == pytest.approx(minutes)
        assert node.unplaced_us == 0


def test_hami_pods_without_a_known_memory_or_number_of_gpus_are_counted_and_on_no_gpu():
    asked = (request("a"), *limits("a", gpumem=8_192))
    observed = seen(requests=asked, busy=(gpu(0, modelName="NVIDIA Unknown"),))
    (node,) = histories(observed)
    assert (held(observed), node.unplaced_us, node.blind) == (({}, 0), 3_600_000_000, {"GPU-0": (SPAN,)})
    (node,) = histories(seen(requests=asked, allocatable=((OFFERED, 10.0),)))
    assert (node.gpus, node.unplaced_us) == ((), 3_600_000_000)
    labels = {"node": "n1", "label_nvidia_com_gpu_product": PRODUCT, "label_nvidia_com_gpu_count": "2"}
    observed = seen(requests=asked, allocatable=((OFFERED, 20.0),), node_labels=(labels,))
    assert held(observed) == ({("a", "imported:n1/0"): 6}, 120)


def test_four_instances_of_an_rtx_pro_6000_are_a_quarter_each():
    model = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    profiles = ("1g.24gb", "1g.24gb+gfx", "1g.24gb-me", "1g.24gb+me.all")
    busy = tuple(
        gpu(0, modelName=model, GPU_I_ID=str(number), GPU_I_PROFILE=name) for number, name in enumerate(profiles, 3)
    )
    kinds = ("mig_1g_24gb", "mig_1g_24gb_gfx", "mig_1g_24gb_me", "mig_1g_24gb_me_all")
    asked = tuple(request(f"p{number}", kind=f"nvidia_com_{kind}") for number, kind in enumerate(kinds))
    assert held(seen(requests=asked, busy=busy)) == ({(f"p{number}", "GPU-0"): 15 for number in range(4)}, 60)


def test_an_instance_whose_memory_the_exporter_rounds_in_another_way_is_found():
    busy = (gpu(0, modelName="NVIDIA H100 NVL", GPU_I_ID="7", GPU_I_PROFILE="1g.11gb"),)
    whole = (gpu(1, modelName="NVIDIA A100 80GB PCIe", GPU_I_ID="0", GPU_I_PROFILE="7g.79gb"),)
    asked = (request("a", kind="nvidia_com_mig_1g_12gb"), request("b", kind="nvidia_com_mig_7g_80gb"))
    minutes, _ = held(seen(requests=asked, busy=busy + whole))
    assert minutes == {("a", "GPU-0"): pytest.approx(60 / 7), ("b", "GPU-1"): 60}


ODD = "a\x1b[2J\n" + "x" * 2_000


def test_no_name_in_a_label_costs_anybody_hours():
    mine = {"namespace": ODD, "pod": ODD, "uid": ODD, "container": ODD}
    about = ({**mine, "node": "n1", "created_by_kind": ODD, "created_by_name": ODD},)
    labels = ({**mine, "label_team": ODD, "label_fake_gputally_dev_queue": ODD},)
    observed = seen(
        requests=(series({**mine, "node": "n1", "resource": "nvidia_com_gpu"}), request("b")),
        busy=(gpu(0), gpu(1, modelName=ODD)), pods=about, pod_labels=labels,
    )  # fmt: skip
    minutes, _ = held(observed, scheduler="fake-scheduler", team_labels=("team",))
    assert sorted(minutes.values()) == [60, 60]
    (node,) = histories(observed, scheduler="fake-scheduler", team_labels=("team",))
    assert [fact_fault(fact, 2**60) for fact in node.facts] == [None, None]
    assert all(is_name(text) for one in node.gpus for text in (one.uuid, one.model))
    assert all(is_name(hold.holder.name) for holds in node.holds.values() for hold in holds)
