"""The pages over HTTP, composed from settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from queue import Queue

import httpx2
import pytest
import structlog

from fairshare.composition import serve_pages
from fairshare.controller.cycle_report import Outcome, TargetReport
from fairshare.controller.policy_file import (
    PolicyConfigMapWriter,
    PolicyFileChanged,
    PolicyNotWritten,
    digest,
    policy_writer,
)
from fairshare.core.queues_and_weights import Standing
from fairshare.core.settings import Settings, SettingsFault, load
from fairshare.targets import KINDS
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web import queue_pages, svg_plots
from fairshare.web.page_authentication import MOST_BYTES
from fairshare.web.queue_history import EVERY_MS, MOST_SAMPLES, ReportCache
from fairshare.web.svg_plots import Line
from gputally.base.clock import VirtualClock
from gputally.kubernetes.memory_cluster import MemoryCluster, load_objects
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Object
from gputally.server.https_server import serve
from gputally.server.tokens_and_grants import new_token
from tests.fairshare.conftest import NOW_MS
from tests.fairshare.web.staging import sample, stage


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Queue[tuple[str, str, int]]]]:
    told: Queue[tuple[str, str, int]] = Queue()
    here = stage(tmp_path_factory.mktemp("served"), cycles=1)
    with serve(here.site.observed(lambda *said: told.put(said[:3])), "127.0.0.1", 0) as url:
        yield url, told


def test_requests_arrive_as_they_were_sent(served: tuple[str, Queue[tuple[str, str, int]]]) -> None:
    url, told = served
    found = httpx2.get(f"{url}/queue/a%2Fb%20c?days=7&days=8")
    assert "no queue 'a/b c'" in unescape(found.text)
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    assert httpx2.post(f"{url}/policy", data={"k": "", "name": "ü &"}).status_code == 403
    assert [told.get(timeout=60) for _ in range(2)] == [("GET", "/queue/a%2Fb%20c", 404), ("POST", "/policy", 403)]


@pytest.mark.parametrize(
    ("content", "kind", "status", "why"),
    [
        (b"x" * (MOST_BYTES + 1), "application/x-www-form-urlencoded", 413, "more than 2097152 bytes"),
        (b"{}", "application/json", 415, "send forms as application/x-www-form-urlencoded"),
        (b"a=1&" * 30_000, "application/x-www-form-urlencoded", 400, "not a form of at most 25000 fields"),
        (b"a=\xff", "application/x-www-form-urlencoded", 400, "not a form"),
    ],
)
def test_bodies_are_bounded(
    served: tuple[str, Queue[tuple[str, str, int]]], content: bytes, kind: str, status: int, why: str
) -> None:
    url, _ = served
    with httpx2.Client() as client:
        try:
            found = client.post(f"{url}/policy", content=content, headers={"Content-Type": kind})
        except httpx2.TransportError:
            assert status == 413, "it hung up before all of it was sent"
        else:
            assert found.status_code == status
            assert why in found.text


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"PAGES_LISTEN": "0.0.0.0:9404"}, "can be reached from elsewhere: set pages_tokens or pages_callers"),
        (
            {"PAGES_CALLERS": "/x", "PAGES_SESSION_KEY": "/k"},
            "goes together with pages_public_url and pages_session_key",
        ),
        ({"PAGES_PUBLIC_URL": "gpus.example"}, "String should match pattern"),
        ({"PAGES_CERTIFICATE": "/x"}, "PAGES_CERTIFICATE: pages_certificate and pages_key go together"),
        ({"PAGES_APPLY": "yes"}, "String should match pattern"),
        ({"PAGES_ACCOUNTANT": "accountant"}, "not an address: 'accountant'"),
        ({"PAGES_LISTEN": "9404"}, "GPUTALLY_FAIRSHARE_PAGES_LISTEN: not an address"),
    ],
)
def test_settings_that_open_too_much_are_refused(environ: dict[str, str], fault: str) -> None:
    given = {f"GPUTALLY_FAIRSHARE_{key}": value for key, value in environ.items()} | {"GPUTALLY_FAIRSHARE_POLICY": "p"}
    with pytest.raises(SettingsFault, match=r"(?i)pages_") as raised:
        load(None, given, {})
    assert fault in str(raised.value)
    assert str(raised.value).startswith("GPUTALLY_FAIRSHARE_PAGES_")


def test_composed_from_settings_with_tokens_and_an_act_that_is_told(tmp_path: Path) -> None:
    structlog.reset_defaults()  # a program that ran in this process may have silenced what is no error
    here = stage(tmp_path, cycles=1)
    token, entry = new_token("ana", ("read", "policy"))
    listed = tmp_path / "tokens.yaml"
    listed.write_text(f"tokens:\n{entry}")
    settings = Settings(
        policy=here.file, pages_listen="127.0.0.1:0", pages_tokens=listed, pages_apply="file",
        accountant="http://127.0.0.1:1", status_namespace="gputally",
    )  # fmt: skip
    cluster = MemoryCluster(KINDS, load_objects(sample("cluster.yaml"), KINDS))
    with (
        structlog.testing.capture_logs() as logged,
        AccountantApi(settings.accountant) as client,
        serve_pages(settings, here.scene, client, VirtualClock(NOW_MS), cluster) as url,
        httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as ana,
    ):
        assert httpx2.get(url).status_code == 401
        form = ana.get("/policy").text
        mark, base = (form.partition(f'name="{name}" value="')[2].partition('"')[0] for name in ("form_token", "base"))
        text = here.file.read_text().replace("k: 2.0", "k: 3.0")
        assert ana.post("/policy/apply", data={"form_token": mark, "base": base, "text": text}).status_code == 200
    assert here.file.read_text() == text
    act = next(each for each in logged if each["event"] == "policy_applied")
    assert (act["by"], act["before"] != act["now"]) == ("ana", True)
    assert [event.reason for event in cluster.events] == ["PolicyApplied"]
    assert token not in str(logged)


def test_a_configmap_is_taken_over_and_written_and_never_over_another_manager(
    either_of: Callable[[Sequence[Object]], Cluster],
) -> None:
    """The same on a real API server, where the field belongs to its creator."""
    made = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "policy", "namespace": "default"},
        "data": {"policy.yaml": "k: 1\n", "other": "kept"},
    }  # fmt: skip
    cluster = either_of([made])
    keep = policy_writer("configmap:default/policy", Path("unused"), cluster)
    assert isinstance(keep, PolicyConfigMapWriter)
    keep.write("k: 2\n", digest("k: 1\n"))
    assert cluster.get(CONFIG_MAP, "policy", "default")["data"] == {"policy.yaml": "k: 2\n", "other": "kept"}
    keep.write("k: 3\n", digest("k: 2\n"))
    with pytest.raises(PolicyFileChanged, match="not what the form was opened on"):
        keep.write("k: 4\n", digest("k: 2\n"))
    assert cluster.get(CONFIG_MAP, "policy", "default")["data"]["policy.yaml"] == "k: 3\n"
    with pytest.raises(PolicyNotWritten):
        PolicyConfigMapWriter(cluster, "default", "none").write("", "")


# --- what stands behind the pages ---------------------------------------------------------------


def test_a_weights_state_is_what_became_of_it(tmp_path: Path) -> None:
    here = stage(tmp_path)
    snapshot = here.scene.now()
    assert snapshot is not None
    apply = next(each for each in snapshot.report.targets[0].outcomes).apply
    made = {
        "applied": "published", "would-apply": "tried", "contested": "trouble", "deferred": "trouble",
    }  # fmt: skip
    for result, state in made.items():
        target = TargetReport(
            "kai", "enforce", standings={apply.queue: Standing(8, 4, 1.0)},
            outcomes=(Outcome(apply, result, "owned by helm"),),  # type: ignore[arg-type]
        )  # fmt: skip
        changed = queue_pages.targets(snapshot.policy, replace(snapshot.report, targets=(target,)))[0]
        row = next(each for each in changed.rows if each.name == apply.queue)
        assert row.state == state
        assert ("owned by helm" in row.why) == (state == "trouble")
        assert {each.state for each in changed.rows if each.name != apply.queue} == {"none"}


def test_samples_are_thinned_bounded_and_forgotten_with_their_queue(tmp_path: Path) -> None:
    here = stage(tmp_path, cycles=1)
    snapshot = here.scene.now()
    assert snapshot is not None
    scene = ReportCache()
    for n in range(MOST_SAMPLES + 10):
        scene.observe(replace(snapshot.report, at_ms=n * EVERY_MS), snapshot.policy)
        scene.observe(replace(snapshot.report, at_ms=n * EVERY_MS + 1), snapshot.policy)
    found = scene.samples("kai", "vision")
    assert len(found) == MOST_SAMPLES
    assert found[-1].at_ms == (MOST_SAMPLES + 9) * EVERY_MS
    smaller = snapshot.policy.model_copy(update={"queues": snapshot.policy.queues[:1]})
    scene.observe(snapshot.report, smaller)
    assert scene.samples("kai", "vision") == ()


def test_plots_say_in_words_what_they_show_and_keep_names_in_their_place() -> None:
    svg = svg_plots.over_time("<b>", [Line("held", "a&b", [(0, 1.0), (50, 3.0)], area=True, steps=True)], 0, 100)
    assert "&lt;b&gt;" in svg
    assert "a&amp;b: 1.0 to 3.0 GPUs, at the end 3.0" in svg
    assert svg_plots.over_time("x", [Line("due", "nothing", [])], 0, 100).count("polyline") == 0
    assert "used – of the capacity" in svg_plots.bullet("x", None, 0.5, 1.0)
    for span in (3_600_000, 86_400_000, 7 * 86_400_000, 31 * 86_400_000):
        assert 2 <= len(svg_plots.ticks(NOW_MS, NOW_MS + span)) <= 10
    assert [svg_plots.nice(value) for value in (0, 0.3, 1, 7, 64, 401)] == [1.0, 0.4, 1.0, 10.0, 100.0, 500.0]
