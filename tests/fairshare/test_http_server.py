"""Metrics, health, the HTTP servers, background tasks, the policy file and settings."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairshare.composition import run_beside
from fairshare.controller.controller_metrics import ControllerMetrics, families
from fairshare.controller.cycle_report import CycleReport, TargetReport
from fairshare.controller.policy_file import in_dry_run, reloaded
from fairshare.core.queues_and_weights import UNLIMITED, Condition, Entitlement, Gang
from fairshare.core.settings import load
from fairshare.http_server import Probes, serve
from fairshare.preemption.claims_and_placement import unplaceable_gpus
from fairshare.targets.status_config_map import StatusObject, changed_conditions, render
from fairshare.usage.multi_cluster_windows import NO_OTHER_CLUSTERS
from gputally.base.background_tasks import BackgroundTask, BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.base.errors import CannotStart, ClusterUnavailable, SettingsFault
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.list_watch import Reflector
from gputally.kubernetes.memory_cluster import MemoryCluster
from gputally.kubernetes.objects import POD
from gputally.server.https_server import serve as serve_app
from gputally.server.request_handling import read_body
from gputally.testing.fake_scheduler import QUEUE, queue_object
from tests.deadlines import patience_s, until
from tests.fairshare.builders import cluster_of, policy_of
from tests.fairshare.conftest import Capsys, Make
from tests.fairshare.preemption_cases import HOUR_MS, NOW_MS, gang
from tests.file_descriptor_limit import no_file_descriptors


def _samples(metrics: ControllerMetrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_metrics_show_the_latest_report(accountant: Any, controller_of: Make, clock: VirtualClock) -> None:
    metrics = ControllerMetrics(clock)
    assert ("gputally_weights_held", "StaleUsage") not in _samples(metrics)
    accountant.spend(a=0.6, b=0.4)
    accountant.age_ms = 30_000
    cluster = cluster_of([queue_object(name) for name in "abc"])
    controller = controller_of(policy_of(k=1.0), cluster, observe=metrics.observe)
    controller.cycle()
    clock.advance(5_000)
    seen = _samples(metrics)
    assert seen["gputally_queue_weight", "a", "fake"] == 0.2
    assert seen["gputally_queue_weight_base", "a"] == 1.0
    assert seen["gputally_queue_usage_ratio", "a", "fake"] == pytest.approx(0.6)
    assert seen["gputally_queue_due_gpus", "c", "fake"] == 11.0
    assert seen["gputally_queue_configured_share_ratio", "a", "fake"] == pytest.approx(1 / 3)
    assert seen["gputally_queue_requested_gpus", "a", "fake"] == 100.0
    assert seen["gputally_queue_allocated_gpus", "a", "fake"] == 4.0
    assert seen["gputally_queue_guaranteed_gpus", "a", "fake"] == 0.0
    assert seen["gputally_fairshare_weight_moves_total", "down", "a", "fake"] == 1.0
    assert seen["gputally_fairshare_weight_moves_total", "turned", "a", "fake"] == 0.0
    assert seen["gputally_fairshare_last_cycle_timestamp_seconds",] == (clock.wall_ms() - 5_000) / 1000
    assert seen["gputally_fairshare_usage_age_seconds",] == 35.0
    assert seen["gputally_fairshare_cycle_seconds_count",] == 1.0
    assert any(name[0] == "gputally_fairshare_build_info" for name in seen)
    accountant.age_ms = 3_600_000
    controller.cycle()
    held = _samples(metrics)
    assert held["gputally_weights_held", "StaleUsage"] == 1.0
    assert ("gputally_queue_due_gpus", "c", "fake") not in held
    assert held["gputally_queue_weight", "a", "fake"] == 0.2


def test_the_leader_metric_is_computed_at_the_scrape(controller_of: Make, clock: VirtualClock) -> None:
    """A cycle that hangs with the API server reports nothing, but the Lease is lost."""
    metrics, acting = ControllerMetrics(clock), {"now": True}
    metrics.watch(None, lambda: acting["now"])
    controller_of(policy_of(), cluster_of([queue_object(name) for name in "abc"]), observe=metrics.observe).cycle()
    assert _samples(metrics)["gputally_fairshare_leader",] == 1.0
    acting["now"] = False
    assert _samples(metrics)["gputally_fairshare_leader",] == 0.0


def test_metrics_name_a_degraded_target(controller_of: Make, clock: VirtualClock) -> None:
    metrics = ControllerMetrics(clock)
    controller_of(policy_of(), MemoryCluster([]), observe=metrics.observe).cycle()
    assert _samples(metrics)["gputally_fairshare_target_degraded", "CRDAbsent", "fake"] == 1.0


def test_a_weight_that_goes_back_has_turned(accountant: Any, controller_of: Make, clock: VirtualClock) -> None:
    metrics = ControllerMetrics(clock)
    cluster = cluster_of([queue_object(name) for name in "abc"])
    controller = controller_of(policy_of(k=1.0), cluster, observe=metrics.observe)
    for used in (0.9, 0.1, 0.1):
        accountant.spend(a=used, b=1 - used)
        controller.cycle()
        clock.advance(3_600_000)
    seen = _samples(metrics)
    moves = {way: seen["gputally_fairshare_weight_moves_total", way, "a", "fake"] for way in ("turned", "down", "up")}
    assert (moves["turned"], moves["down"], moves["up"] >= 1.0) == (1.0, 1.0, True)


def test_metrics_are_not_answered_under_a_name_that_a_stranger_registered() -> None:
    """Such a name can resolve to the controller's address in a browser (DNS rebinding)."""
    hosts = ("metrics.example.com",)
    with serve("127.0.0.1", 0, live=lambda: None, ready=lambda: None, metrics=lambda: b"x 1\n", hosts=hosts) as url:
        for host, status in (
            ("evil.example.com", 421), ("metrics.example.com:9402", 200), ("10.1.2.3:9402", 200), ("localhost", 200),
            ("gputally-fairshare.gputally.svc", 200), ("gputally-fairshare.gputally.svc.cluster.local:9402", 200),
        ):  # fmt: skip
            for path in ("/metrics", "/readyz"):
                assert httpx2.get(url + path, headers={"Host": host}).status_code == status, host


def test_health_turns_with_the_cycles(clock: VirtualClock) -> None:
    health = Probes(clock, interval_s=60)
    assert (health.live(), health.ready()) == (None, "the first cycle has not ended yet")
    health.beat()
    assert health.ready() is None
    clock.advance(240_000)
    assert health.live() is None
    clock.advance(1)
    assert health.live() == "no cycle has ended for 240 s"


def test_the_server_answers_probes_and_nothing_else() -> None:
    faults: list[str | None] = [None]
    with serve("127.0.0.1", 0, live=lambda: faults[0], ready=lambda: None, metrics=lambda: b"x 1\n") as url:
        assert [httpx2.get(f"{url}/{path}").content for path in ("metrics", "livez")] == [b"x 1\n", b"ok\n"]
        faults[0] = "stuck"
        stuck = httpx2.get(f"{url}/livez")
        assert (stuck.status_code, stuck.content) == (503, b"stuck\n")
        assert httpx2.get(f"{url}/policy").status_code == 404
        port = int(url.rpartition(":")[2])
        taken = serve("127.0.0.1", port, live=lambda: None, ready=lambda: None, metrics=lambda: b"")
        with pytest.raises(CannotStart, match="Address already in use"), taken:
            pass


@pytest.mark.parametrize(("fault", "told"), [(None, []), (ValueError("defect"), [("error", "request_failed")])])
def test_a_client_that_goes_away_is_no_news_and_a_defect_is_one_line(
    capfd: Capsys, fault: Exception | None, told: list[tuple[str, str]]
) -> None:
    asked, gone = threading.Event(), threading.Event()

    def metrics() -> bytes:
        asked.set()
        gone.wait(10)
        if fault is not None:
            raise fault
        return b"x" * 10_000_000

    structlog.reset_defaults()
    with (
        structlog.testing.capture_logs() as logs,
        serve("127.0.0.1", 0, live=lambda: None, ready=lambda: None, metrics=metrics) as url,
    ):
        client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert asked.wait(10)
        client.close()
        gone.set()
    assert [(entry["log_level"], entry["event"]) for entry in logs] == told
    assert capfd.readouterr().err == ""


def test_a_policy_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("k: 1\nqueues: [{name: a}]\n")
    file = reloaded(path, NO_OTHER_CLUSTERS)
    assert not file.renew()

    def rewrite(text: str, mtime_ns: int) -> None:
        path.write_text(text)
        os.utime(path, ns=(mtime_ns, mtime_ns))

    rewrite("k: 2\nqueues: [{name: a}]\n", 1_000)
    assert file.renew()
    assert file.current.k == 2.0
    rewrite("k: -1\nqueues: [{name: a}]\n", 2_000)
    with pytest.raises(FileFault, match=r"policy\.yaml:1: k: "):
        file.renew()
    assert not file.renew()
    assert file.current.k == 2.0
    path.unlink()
    with pytest.raises(FileFault, match="No such file"):
        file.renew()
    assert not file.renew()


def test_a_policy_file_that_cannot_be_read_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("k: 1\nqueues: [{name: a}]\n")
    file = reloaded(path, NO_OTHER_CLUSTERS)
    path.write_text("k: 2\nqueues: [{name: a}, {name: b}]\n")
    with no_file_descriptors():
        with pytest.raises(FileFault, match=r"policy\.yaml: Too many open files"):
            file.renew()
        assert not file.renew()  # it was said
    assert file.renew()
    assert file.current.k == 2.0
    assert not file.renew()


def test_a_mounted_policy_is_read_again_once_swapped(tmp_path: Path, accountant: Any, controller_of: Make) -> None:
    """As the kubelet updates a mounted ConfigMap: it swaps a symlink in one step. The next cycle uses the new
    policy."""
    text = "k: {k}\ntargets: {{fake: {{apply: enforce}}}}\nqueues: [{{name: a, weight: {w}, refs: [fake:a]}}]\n"
    for name, weight in (("old", 1), ("new", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.yaml").write_text(text.format(k=weight, w=weight))
    data = tmp_path / "..data"
    data.symlink_to("old")
    (tmp_path / "policy.yaml").symlink_to(Path("..data") / "policy.yaml")
    file = reloaded(tmp_path / "policy.yaml", NO_OTHER_CLUSTERS)
    cluster = cluster_of([queue_object("a")])
    accountant.spend(a=1.0)
    stop = threading.Event()
    seen: list[tuple[str, float]] = []

    def observe(report: CycleReport) -> None:
        seen.append((report.policy_version, cluster.get(QUEUE, "a")["spec"]["weight"]))
        if len(seen) == 1:
            (tmp_path / "..tmp").symlink_to("new")
            (tmp_path / "..tmp").replace(data)
        if len(seen) == 8:
            stop.set()

    def changed() -> Any:
        return file.current if file.renew() else None

    controller_of(file.current, cluster, observe=observe).run(stop, reload=changed)
    versions = [policy.version() for policy in accountant.policies]
    assert [version for version, _ in seen] == [versions[0], *[versions[1]] * 7]
    assert (seen[0][1], seen[-1][1]) == (1, 3)


def test_a_dry_run_policy_differs_in_apply_alone() -> None:
    policy = policy_of(apply="enforce")
    assert in_dry_run(policy) == policy_of(apply="dry-run")


def test_settings_come_from_file_environment_and_flags_in_this_order(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("policy: from-file.yaml\ninterval: 2m\nlisten: '[::1]:9000'\n")
    environ = {"GPUTALLY_FAIRSHARE_INTERVAL": "3m", "GPUTALLY_FAIRSHARE_DRY_RUN": "true", "OTHER": "x"}
    environ["GPUTALLY_FAIRSHARE_SERVICE_PORT"] = "80"  # of a Service of that name, by Kubernetes
    settings = load(path, environ, {"policy": "from-flag.yaml"})
    assert (settings.policy, settings.interval, settings.dry_run) == (Path("from-flag.yaml"), 180, True)
    assert (settings.host, settings.port) == ("::1", 9000)
    path.write_text("- a list\n")
    with pytest.raises(SettingsFault, match="settings are a mapping"):
        load(path, {}, {})
    with pytest.raises(SettingsFault) as told:
        load(None, {"GPUTALLY_FAIRSHARE_COLOUR": "blue", "GPUTALLY_FAIRSHARE_INTERVAL": "0s"}, {"policy": "x"})
    assert str(told.value).splitlines() == [
        "GPUTALLY_FAIRSHARE_COLOUR: no such setting",
        "GPUTALLY_FAIRSHARE_INTERVAL: must be at least 1",
    ]


def test_only_a_changed_condition_is_an_event() -> None:
    good = Condition("Effective", "True", "WeightsOnly", "fine")
    bad = Condition("Effective", "False", "HistoryCountedTwice", "it counts")
    where = StatusObject()
    assert changed_conditions(where, (), [("fake", good)], 1) == ()
    (begun,) = changed_conditions(where, [("fake", good)], [("fake", bad)], 2)
    assert (begun.type, begun.reason, begun.message) == ("Warning", "HistoryCountedTwice", "fake: it counts")
    assert changed_conditions(where, [("fake", bad)], [("fake", bad)], 3) == ()
    (ended,) = changed_conditions(where, [("fake", bad)], [("fake", good)], 4)
    assert ended.type == "Normal"


def test_an_unreadable_status_is_written_anew() -> None:
    where = StatusObject("ns", "x")
    for garbled in ("no json", "[]", '{"status": "True", "lastTransitionTime": 7}'):
        standing = {"data": {"Fresh": garbled}}
        rendered = render(where, [("", Condition("Fresh", "True", "R", "m"))], standing, 0)
        assert '"lastTransitionTime":"1970-01-01T00:00:00.000Z"' in rendered["data"]["Fresh"]


def shown(report: CycleReport) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("gputally_"), *sample.labels.values()): sample.value
        for family in families(report, NOW_MS)
        for sample in family.samples
    }


def report(*gangs: Gang, entitlements: tuple[Entitlement, ...] = (), **free: float) -> CycleReport:
    target = TargetReport("kueue", "weight", gangs=gangs, entitlements=entitlements)
    return CycleReport(NOW_MS, 0, "v", None, None, (), (target,), free_by_node=free)


def test_waiting_is_summed_by_queue_and_the_oldest_wait_counts() -> None:
    waiting = [gang("old", "nlp", waiting=(4, 4), hours=3), gang("new", "nlp", waiting=(1,), hours=1)]
    seen = shown(report(*waiting, gang("runs", "vision", on=(("n1", 8),), hours=9)))
    assert seen["queue_waiting_gpus", "nlp"] == 9
    assert seen["queue_waiting_workloads", "nlp"] == 2
    assert seen["queue_oldest_wait_seconds", "nlp"] == 3 * HOUR_MS / 1000
    assert seen["queue_waiting_gpus", "vision"] == seen["queue_oldest_wait_seconds", "vision"] == 0


def test_an_unlimited_guarantee_is_no_number() -> None:
    due = (Entitlement("a", None, 4, 4, 0.5, 8, 2, 3.0), Entitlement("b", None, 4, 4, 0.5, 8, 2, UNLIMITED))
    seen = shown(report(entitlements=due))
    assert seen["queue_guaranteed_gpus", "a", "kueue"] == 3
    assert ("queue_guaranteed_gpus", "b", "kueue") not in seen


FITS, SMALL, WHOLE_NODE = (gang(name, "a", waiting=(size,)) for name, size in (("fits", 5), ("small", 4), ("whole", 8)))


@pytest.mark.parametrize(
    ("gangs", "stranded"),
    [([], 0), ([FITS], 0), ([WHOLE_NODE], 8), ([WHOLE_NODE, SMALL], 4), ([gang("runs", "a", on=(("n3", 8),))], 0)],
)
def test_free_gpus_are_stranded_only_while_a_pod_waits(gangs: list[Gang], stranded: float) -> None:
    assert unplaceable_gpus({"n1": 3.0, "n2": 5.0}, gangs) == stranded
    assert shown(report(*gangs, n1=3.0, n2=5.0))["fairshare_stranded_gpus",] == stranded
    assert unplaceable_gpus({"n1": -1.0}, gangs) == 0


_INTERRUPTED = """
import signal, threading
from gputally.base.background_tasks import set_on_signals
stop = threading.Event()
set_on_signals(stop)
with stop._cond:  # the main thread is inside the event when the signal arrives
    signal.raise_signal(signal.SIGTERM)
stop.wait()
print("ended")
"""


_ELSEWHERE = """
import signal, threading
from gputally.base.background_tasks import set_on_signals
stop = threading.Event()
set_on_signals(stop)
def arrive():  # in a thread, once the main thread waits, which the signal does not wake
    while not stop._cond._waiters:
        pass
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=arrive, daemon=True).start()
stop.wait()
print("ended")
"""


_NESTED = """
import os, signal, threading
from gputally.base.background_tasks import set_on_signals
outer, inner = threading.Event(), threading.Event()
set_on_signals(outer)
before = sorted(os.listdir("/proc/self/fd"))
for _ in range(3):
    restore = set_on_signals(inner)
    inner.clear()
    signal.raise_signal(signal.SIGTERM)
    inner.wait()
    (thread,) = [each for each in threading.enumerate() if each.name == "signals"][1:]
    restore()
    thread.join()
assert sorted(os.listdir("/proc/self/fd")) == before
assert not outer.is_set()
inner.clear()
signal.raise_signal(signal.SIGTERM)
outer.wait()
print("ended", inner.is_set())
"""


def test_the_wait_for_signals_is_nested_and_undone_and_leaves_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NESTED], capture_output=True, text=True, timeout=patience_s(), check=True
    )
    assert done.stdout == "ended False\n"


def test_a_cycle_with_a_defect_is_not_the_last(accountant: Any, controller_of: Make, clock: VirtualClock) -> None:
    accountant.spend(a=0.6, b=0.4)
    tasks, stop = BackgroundTasks(clock), threading.Event()
    task, told = tasks.add("cycle", serves=True), list[Exception]()
    health, metrics = Probes(clock, 60, tasks), ControllerMetrics(clock, 60, tasks)
    seen: list[tuple[str | None, float | None]] = []
    controller: Any = None

    def pods() -> tuple[()]:
        """Called in each cycle; the first two calls raise."""
        if len(told) < 2:
            raise KeyError("spec")
        return ()

    def reload() -> None:
        seen.append((health.ready(), _samples(metrics)["gputally_task_stopped", "cycle"]))
        if len(seen) == 4:
            stop.set()

    def observe(_: object) -> None:
        health.beat()

    queues = cluster_of([queue_object(name) for name in "abc"])
    controller = controller_of(policy_of(), queues, observe=observe, pods=pods)
    controller.run(stop, lambda: task.guarded(told.append), reload=reload)
    assert seen[0] == ("the first cycle has not ended yet", 0)
    assert seen[1:3] == [("cycle failed: see the log for the reason", 1)] * 2
    assert seen[3] == (None, 0), "the third cycle did its work"
    assert [type(error) for error in told] == [KeyError, KeyError]


def test_a_cycle_that_hangs_is_seen_within_a_minute(clock: VirtualClock) -> None:
    tasks = BackgroundTasks(clock)
    health, metrics = Probes(clock, 600, tasks), ControllerMetrics(clock, 600, tasks)
    health.beat()
    with tasks.add("cycle", 50, serves=True).running(), tasks.add("sessions", 10).running():
        assert health.ready() is None
        clock.advance(15_000)
        assert "sessions" in tasks.faults()
        assert health.ready() is None, "the controller acts without this task"
        clock.advance(40_000)
        assert health.ready() == "cycle has not ended for 55 s: see the log for the reason"
        assert _samples(metrics)["gputally_task_stopped", "cycle"] == 1
    assert health.ready() is None


@pytest.mark.parametrize("raises", [True, False])
def test_work_that_ends_is_begun_again(clock: VirtualClock, raises: bool) -> None:
    tasks, stop, begun = BackgroundTasks(clock), threading.Event(), threading.Semaphore(0)

    def work(_stop: threading.Event, _task: BackgroundTask) -> None:
        begun.release()
        if raises:
            raise ValueError("not an object")

    with structlog.testing.capture_logs() as logs, run_beside("watch", work, stop, tasks):
        assert begun.acquire(timeout=30)
        assert begun.acquire(timeout=30)
        assert (tasks.states()["watch"].failures > 0) == raises
        assert ("watch" in tasks.faults()) == raises
    assert {log["what"] for log in logs} == ({"watch"} if raises else set())
    assert not tasks.faults(), "it is not needed any more"


class Instantly(threading.Event):
    """Waits without passing time."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_a_watch_tells_of_its_progress_and_hangs_where_no_answer_comes(clock: VirtualClock) -> None:
    """An unreachable API server leads to a retry; only a request that never ends is a fault."""
    stop, asked = Instantly(), list[int]()
    task = BackgroundTasks(clock).add("pods", 285)

    class Api:
        def get(self, *_: object, **__: object) -> bytes:
            asked.append(1)
            if len(asked) == 3:
                clock.advance(286_000)
                assert task.state().fault == "has not ended for 286 s"
                stop.set()
            raise ClusterUnavailable("no answer")

    pods = Reflector(Api(), POD.path(), dict, lambda obj: obj)  # type: ignore[arg-type, var-annotated]
    pods.run(stop, task)
    assert len(asked) == 3
    assert pods.fault == "no answer"


@pytest.mark.parametrize("program", [_INTERRUPTED, _ELSEWHERE], ids=["inside the event", "not waking the main thread"])
def test_a_signal_is_not_lost_whatever_the_main_thread_does(program: str) -> None:
    """A handler that sets the event itself would wait for ever for the main thread that it interrupts, and one that
    runs in the main thread for a main thread that waits for the event."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience_s(), check=True
    )
    assert done.stdout == "ended\n"


def test_a_body_that_trickles_is_not_waited_for() -> None:
    async def echo(request: Request) -> Response:
        return Response(await read_body(request, 100_000, 0.3))

    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    with serve_app(app, "127.0.0.1", 0) as url:
        found = httpx2.URL(url)
        with socket.create_connection((found.host, found.port or 0)) as one:
            one.sendall(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
            one.settimeout(0.05)

            def ended() -> bool:
                try:
                    one.sendall(b"x")
                    return not one.recv(100)
                except TimeoutError:
                    return False
                except ConnectionError:
                    return True

            until(ended, "the server waits for it", 5)
