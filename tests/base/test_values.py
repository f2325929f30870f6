"""Clocks, exact division, YAML with places, and the queue that a pod's labels name."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputally.base.apportionment import apportion, prorate
from gputally.base.clock import SystemClock, VirtualClock
from gputally.base.errors import without_password
from gputally.base.yaml_file import FileFault, convert, parse, read
from gputally.kubernetes.pod_queue_labels import queue_ref
from tests.plugin_cases import plugin_cases


@pytest.mark.parametrize(("text", "shown"), [
    ("http://host:80/path", "http://host:80/path"),
    ("http://user@host", "http://user@host"),
    ("http://user:word@host:80/path", "http://user:***@host:80/path"),
    ("postgresql+psycopg://a:b@c/d?timeout=1", "postgresql+psycopg://a:***@c/d?timeout=1"),
    ("http://:word@host", "http://:***@host"),
    ("http://user:w#r/d@2@host", "http://user:***@host"),
    ("user:word@host:80", "user:***@host:80"),
    ("cannot reach http://user:word@host: refused", "cannot reach http://user:***@host: refused"),
])  # fmt: skip
def test_a_message_hides_the_password_of_a_url(text: str, shown: str) -> None:
    assert without_password(text) == shown


def test_virtual_time_passes_on_both_clocks_and_only_when_moved() -> None:
    clock = VirtualClock(wall_ms=1_000_000, monotonic_ms=7)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (1_000_000, 7)
    clock.advance(250)
    clock.advance_to(1_001_000)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (1_001_000, 1_007)
    clock.step_wall(-5_000)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (996_000, 1_007)
    with pytest.raises(ValueError, match="negative time"):
        clock.advance_to(995_999)


def test_waiting_passes_virtual_time_unless_it_is_stopped() -> None:
    clock, stop = VirtualClock(wall_ms=0), threading.Event()
    assert clock.wait(1.5, stop) is False
    stop.set()
    assert clock.wait(10, stop) is True
    assert clock.wall_ms() == 1_500


def test_the_system_clock_reads_milliseconds() -> None:
    clock = SystemClock()
    assert clock.wall_ms() > 1_700_000_000_000
    before = clock.monotonic_ms()
    assert clock.monotonic_ms() >= before >= 0
    stop = threading.Event()
    stop.set()
    assert clock.wait(60, stop) is True


weights = st.lists(st.integers(0, 10**9), min_size=1, max_size=12)


@given(st.integers(0, 10**15), weights)
def test_apportioned_parts_add_up_and_stay_within_one_of_the_exact_share(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    exact = weights if any(weights) else [1] * len(weights)
    for part, weight in zip(parts, exact, strict=True):
        assert abs(part * sum(exact) - total * weight) < sum(exact)


def test_equal_remainders_go_to_the_earlier_position() -> None:
    assert apportion(2, [1, 1, 1]) == [1, 1, 0]
    assert apportion(5, [0, 0]) == [3, 2]
    assert apportion(60_000_000, [1] * 7)[:4] == [8_571_429] * 4


@pytest.mark.parametrize(("total", "weights"), [(-1, [1]), (1, [-1]), (1, [])])
def test_apportion_refuses_what_cannot_be_divided(total: int, weights: list[int]) -> None:
    with pytest.raises(ValueError, match="apportion needs"):
        apportion(total, weights)


@given(st.integers(0, 10**15), st.lists(st.integers(1, 10**6), min_size=1, max_size=10))
def test_prorated_pieces_add_up_to_the_whole(value: int, lengths: list[int]) -> None:
    span, start, total = sum(lengths), 0, 0
    for length in lengths:
        piece = prorate(value, span, start, start + length)
        assert piece >= 0
        total += piece
        start += length
    assert total == value


@pytest.mark.parametrize(("span", "start", "end"), [(0, 0, 0), (10, 5, 4), (10, -1, 4), (10, 0, 11)])
def test_prorate_refuses_a_piece_outside_the_span(span: int, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="prorate needs"):
        prorate(1, span, start, end)


QUEUES = """\
# a comment
queues:
  - name: vision
    weight: 2
  - name: nlp
    weight: -1
since: 2026-10-01
"""


class Queue(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    weight: int = 1


class Queues(msgspec.Struct, forbid_unknown_fields=True):
    queues: list[Queue]
    since: str = ""


def test_every_key_and_item_knows_its_line() -> None:
    document = parse(QUEUES, "p.yaml")
    assert document.place(("queues", 1, "weight")) == "p.yaml:6"
    assert document.place(("queues", 1, "no such key")) == "p.yaml:5"
    assert document.place(("nothing",)) == "p.yaml:2"


def test_a_small_file_is_read_and_dates_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "queues.yaml"
    path.write_text(QUEUES, encoding="utf-8")
    found = convert(read(path), Queues)
    assert ([queue.weight for queue in found.queues], found.since) == ([2, -1], "2026-10-01")
    path.write_text("", encoding="utf-8")
    assert read(path).data is None


def test_a_duplicate_key_is_a_fault_and_names_the_first() -> None:
    with pytest.raises(FileFault, match=r"^p.yaml:3: key 'a' occurs twice, first on line 1$"):
        parse("a: 1\nb: 2\na: 3\n", "p.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1, 2\n", 2),
        ("a: b: c\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: !!python/object:os.system x\n", 1),
        ("a:\n- !!timestamp never\n", 2),
    ],
)
def test_what_is_not_one_plain_yaml_document_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(FileFault, match=rf"^p\.yaml:{line}: "):
        parse(text, "p.yaml")


@pytest.mark.parametrize(("text", "fault"), [
    ("queues:\n  - name: a\n    weight: x\n", "p.yaml:3: queues.0.weight: Expected `int`, got `str`"),
    ("queues:\n  - name: a\n    wieght: 2\n", "p.yaml:3: queues.0.wieght: unknown key"),
    ("queues:\n  - weight: 2\n", "p.yaml:2: queues.0: Object missing required field `name`"),
    ("- 1\n", "p.yaml:1: Expected `object`, got `array`"),
])  # fmt: skip
def test_a_wrong_shape_is_answered_with_the_place_of_the_fault(text: str, fault: str) -> None:
    with pytest.raises(FileFault) as caught:
        convert(parse(text, "p.yaml"), Queues)
    assert caught.value.faults == (fault,)


@pytest.mark.parametrize(("name", "content", "fault"), [
    ("absent.yaml", None, "absent.yaml: No such file"),
    ("latin.yaml", b"name: caf\xe9\n", "latin.yaml:1: not UTF-8"),
    ("large.yaml", b"#" * (4 * 1024 * 1024 + 1), "large.yaml:1: the file is larger than 4 MiB"),
], ids=["absent", "latin", "large"])  # fmt: skip
def test_files_that_cannot_be_read_are_faults_too(tmp_path: Path, name: str, content: bytes | None, fault: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FileFault, match=fault):
        read(tmp_path / name)


def test_a_text_longer_than_its_caller_allows_is_not_parsed() -> None:
    with pytest.raises(FileFault, match=r"c\.yaml:1: longer than 10 characters"):
        parse("a: [" * 10, "c.yaml", 10)


CASES = {cases.PLACES[0]: cases.QUEUE_REFS for cases in plugin_cases("fairshare").values()}
OTHER, SLURM = "another-scheduler", "slurm-bridge-scheduler"


@pytest.mark.parametrize(("scheduler", "labels", "annotations", "ref"), [
    *((scheduler, *each) for scheduler, refs in CASES.items() for each in refs),
    *((other, *each[:2], "") for other in ("default-scheduler", OTHER, "") for refs in CASES.values() for each in refs),
    (SLURM, {}, {"slinky.slurm.net/slurm-account": "physics"}, "slurm:physics"),
    (SLURM, {}, {"slurmjob.slinky.slurm.net/account": "physics"}, "slurm:physics"),
    *((other, {key: "q"}, {}, "") for other in ("default-scheduler", "") for key in (
        "kai.scheduler/queue", "runai/queue", "slinky.slurm.net/slurm-account")),
    *((other, {}, {key: "q"}, "") for other in ("default-scheduler", OTHER) for key in (
        "slinky.slurm.net/slurm-account", "slurmjob.slinky.slurm.net/account")),
    ("default-scheduler", {}, {"kueue.x-k8s.io/queue-name": "a"}, ""),
    ("default-scheduler", {}, {}, ""),
])  # fmt: skip
def test_a_queue_counts_where_its_scheduler_enforces_it(
    scheduler: str, labels: dict[str, str], annotations: dict[str, str], ref: str
) -> None:
    assert queue_ref("ns", scheduler, labels, annotations) == ref
