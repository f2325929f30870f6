"""Metrics, health, policy file, settings, events of changed conditions, and capacity."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from accountant.wire.policy_models import UsageWindow
from fairshare.controller.control_loop import Controller
from fairshare.controller.controller_metrics import Metrics
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.policy_file import PolicyFile, in_dry_run
from fairshare.core.queues_and_weights import Condition
from fairshare.core.settings import SettingsFault, load
from fairshare.http_server import Health, serve
from fairshare.targets.kai import QUEUE
from fairshare.targets.status_config_map import StatusObject, changed_conditions, render
from fairshare.usage.cluster_capacity import gpus_of_window
from gputally.base.clock import VirtualClock
from gputally.base.errors import CannotStart
from gputally.base.yaml_file import FileFault
from gputally.kubernetes.memory_cluster import MemoryCluster
from tests.fairshare.builders import cluster_of, policy_of, queue_object
from tests.limits import no_more_files

Make = Callable[..., Any]


def _samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_metrics_show_the_latest_report(accountant: Any, controller_of: Make, clock: VirtualClock) -> None:
    metrics = Metrics(clock)
    assert ("gputally_weights_held", "StaleUsage") not in _samples(metrics)
    accountant.spend(a=0.6, b=0.4)
    accountant.age_ms = 30_000
    cluster = cluster_of([queue_object(name) for name in "abc"])
    controller = controller_of(policy_of(k=1.0), cluster, observe=metrics.observe)
    controller.cycle()
    clock.advance(5_000)
    seen = _samples(metrics)
    assert seen["gputally_queue_weight", "a", "kai"] == 0.5
    assert seen["gputally_queue_weight_base", "a"] == 1.0
    assert seen["gputally_queue_usage_ratio", "a", "kai"] == pytest.approx(0.6)
    assert seen["gputally_queue_entitled_gpus", "c", "kai"] == 11.0
    assert seen["gputally_queue_configured_share_ratio", "a", "kai"] == pytest.approx(1 / 3)
    assert seen["gputally_queue_requested_gpus", "a", "kai"] == 100.0
    assert seen["gputally_queue_allocated_gpus", "a", "kai"] == 4.0
    assert seen["gputally_queue_guaranteed_gpus", "a", "kai"] == 0.0
    assert seen["gputally_fairshare_weight_moves_total", "down", "a", "kai"] == 1.0
    assert seen["gputally_fairshare_weight_moves_total", "turned", "a", "kai"] == 0.0
    assert seen["gputally_fairshare_last_cycle_timestamp_seconds",] == (clock.wall_ms() - 5_000) / 1000
    assert seen["gputally_fairshare_usage_age_seconds",] == 35.0
    assert seen["gputally_fairshare_cycle_seconds_count",] == 1.0
    assert any(name[0] == "gputally_fairshare_build_info" for name in seen)
    accountant.age_ms = 3_600_000
    controller.cycle()
    held = _samples(metrics)
    assert held["gputally_weights_held", "StaleUsage"] == 1.0
    assert ("gputally_queue_entitled_gpus", "c", "kai") not in held
    assert held["gputally_queue_weight", "a", "kai"] == 0.5


def test_the_leader_metric_is_computed_at_the_scrape(controller_of: Make, clock: VirtualClock) -> None:
    """A cycle that hangs, because the API server does, reports nothing: the Lease is lost all the same."""
    metrics, acting = Metrics(clock), {"now": True}
    metrics.watch(None, lambda: acting["now"])
    controller_of(policy_of(), cluster_of([queue_object(name) for name in "abc"]), observe=metrics.observe).cycle()
    assert _samples(metrics)["gputally_fairshare_leader",] == 1.0
    acting["now"] = False
    assert _samples(metrics)["gputally_fairshare_leader",] == 0.0


def test_metrics_name_a_degraded_target(controller_of: Make, clock: VirtualClock) -> None:
    metrics = Metrics(clock)
    controller_of(policy_of(), MemoryCluster([]), observe=metrics.observe).cycle()
    assert _samples(metrics)["gputally_fairshare_target_degraded", "CRDAbsent", "kai"] == 1.0


def test_a_weight_that_goes_back_has_turned(accountant: Any, controller_of: Make, clock: VirtualClock) -> None:
    metrics = Metrics(clock)
    cluster = cluster_of([queue_object(name) for name in "abc"])
    controller = controller_of(policy_of(k=1.0), cluster, observe=metrics.observe)
    for used in (0.9, 0.1, 0.1):
        accountant.spend(a=used, b=1 - used)
        controller.cycle()
        clock.advance(3_600_000)
    seen = _samples(metrics)
    moves = {
        key[1]: value
        for key, value in seen.items()
        if key[0] == "gputally_fairshare_weight_moves_total" and key[2] == "a"
    }
    assert moves["turned"] == 1.0
    assert moves["down"] == 1.0
    assert moves["up"] >= 1.0


def test_health_turns_with_the_cycles(clock: VirtualClock) -> None:
    health = Health(clock, interval_s=60)
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
        assert urlopen(f"{url}/metrics").read() == b"x 1\n"
        assert urlopen(f"{url}/livez").read() == b"ok\n"
        faults[0] = "stuck"
        with pytest.raises(HTTPError) as told:
            urlopen(f"{url}/livez")
        with told.value as answer:
            assert (answer.code, answer.read()) == (503, b"stuck\n")
        with pytest.raises(HTTPError) as told:
            urlopen(f"{url}/policy")
        with told.value as answer:
            assert answer.code == 404
        port = int(url.rpartition(":")[2])
        with (
            pytest.raises(CannotStart, match="Address already in use"),
            serve("127.0.0.1", port, live=lambda: None, ready=lambda: None, metrics=lambda: b""),
        ):
            pass


@pytest.mark.parametrize(("fault", "told"), [(None, []), (ValueError("defect"), [("error", "request_failed")])])
def test_a_client_that_goes_away_is_no_news_and_a_defect_is_one_line(
    capfd: pytest.CaptureFixture[str], fault: Exception | None, told: list[tuple[str, str]]
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
    file = PolicyFile(path)
    assert file.changed() is None

    def rewrite(text: str, mtime_ns: int) -> None:
        path.write_text(text)
        os.utime(path, ns=(mtime_ns, mtime_ns))

    rewrite("k: 2\nqueues: [{name: a}]\n", 1_000)
    changed = file.changed()
    assert changed is not None
    assert changed.k == 2.0
    rewrite("k: -1\nqueues: [{name: a}]\n", 2_000)
    with pytest.raises(FileFault, match=r"policy\.yaml:1: k: "):
        file.changed()
    assert file.changed() is None
    assert file.policy.k == 2.0
    path.unlink()
    with pytest.raises(FileFault, match="No such file"):
        file.changed()
    assert file.changed() is None


def test_a_policy_file_that_cannot_be_read_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("k: 1\nqueues: [{name: a}]\n")
    file = PolicyFile(path)
    path.write_text("k: 2\nqueues: [{name: a}, {name: b}]\n")
    with no_more_files():
        with pytest.raises(FileFault, match=r"policy\.yaml: Too many open files"):
            file.changed()
        assert file.changed() is None  # it was said
    found = file.changed()
    assert found is not None
    assert found.k == 2.0
    assert file.changed() is None


def test_a_mounted_policy_is_read_again_when_its_folder_is_swapped(
    tmp_path: Path, accountant: Any, clock: VirtualClock
) -> None:
    """As the kubelet renews a mounted ConfigMap: a symlink to another folder, in one step. Next cycle, new policy."""
    text = "k: {k}\ntargets: {{kai: {{apply: enforce}}}}\nqueues: [{{name: a, weight: {w}, refs: [kai:a]}}]\n"
    for name, weight in (("old", 1), ("new", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.yaml").write_text(text.format(k=weight, w=weight))
    data = tmp_path / "..data"
    data.symlink_to("old")
    (tmp_path / "policy.yaml").symlink_to(Path("..data") / "policy.yaml")
    file = PolicyFile(tmp_path / "policy.yaml")
    cluster = cluster_of([queue_object("a")])
    accountant.spend(a=1.0)
    stop = threading.Event()
    seen: list[tuple[str, float]] = []

    def observe(report: CycleReport) -> None:
        seen.append((report.policy_version, cluster.get(QUEUE, "a")["spec"]["resources"]["gpu"]["overQuotaWeight"]))
        if len(seen) == 1:
            (tmp_path / "..tmp").symlink_to("new")
            (tmp_path / "..tmp").replace(data)
        if len(seen) == 8:
            stop.set()

    Controller(file.policy, accountant, cluster, clock, reload=file.changed, observe=observe).run(stop)
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
        "GPUTALLY_FAIRSHARE_INTERVAL: Input should be greater than or equal to 1",
    ]


def test_only_a_changed_condition_is_an_event() -> None:
    good = Condition("Effective", "True", "WeightsOnly", "fine")
    bad = Condition("Effective", "False", "HistoryCountedTwice", "kValue is 1")
    where = StatusObject()
    assert changed_conditions(where, (), [("kai", good)], 1) == ()
    (begun,) = changed_conditions(where, [("kai", good)], [("kai", bad)], 2)
    assert (begun.type, begun.reason, begun.message) == ("Warning", "HistoryCountedTwice", "kai: kValue is 1")
    assert changed_conditions(where, [("kai", bad)], [("kai", bad)], 3) == ()
    (ended,) = changed_conditions(where, [("kai", bad)], [("kai", good)], 4)
    assert ended.type == "Normal"


def test_an_unreadable_status_is_written_anew() -> None:
    where = StatusObject("ns", "x")
    for garbled in ("no json", "[]", '{"status": "True", "lastTransitionTime": 7}'):
        standing = {"data": {"Fresh": garbled}}
        rendered = render(where, [("", Condition("Fresh", "True", "R", "m"))], standing, 0)
        assert '"lastTransitionTime": "1970-01-01T00:00:00.000Z"' in rendered["data"]["Fresh"]


def test_gpus_of_a_window_undo_its_weighing() -> None:
    def window(**change: Any) -> UsageWindow:
        fields = {
            "kind": "sliding", "start_ms": 0, "end_ms": 3_600_000, "half_life_s": None, "measure": "allocated",
            "unit": "gpu_us", "by": "queue", "usage": {}, "unassigned": 0, "capacity": 8 * 3_600_000_000,
            "watermark_ms": None, "coverage": 1.0, "policy_version": None,
        }  # fmt: skip
        return UsageWindow.model_validate(fields | change)

    assert gpus_of_window(window()) == 8.0
    decayed = round(8 * 1e6 * 600 / log(2) * (1 - 2**-6))  # half-life 10 min over an hour
    assert gpus_of_window(window(half_life_s=600, capacity=decayed)) == pytest.approx(8.0)
    young = window(since_ms=2_700_000, capacity=8 * 900_000_000)  # books of the last quarter of an hour
    assert gpus_of_window(young) == 8.0
    decayed = round(8 * 1e6 * 600 / log(2) * (1 - 2**-1.5))
    assert gpus_of_window(window(since_ms=2_700_000, half_life_s=600, capacity=decayed)) == pytest.approx(8.0)
    assert gpus_of_window(window(since_ms=3_600_000, capacity=0)) is None
    assert gpus_of_window(window(unit="uj")) is None
    assert gpus_of_window(window(end_ms=0)) is None
