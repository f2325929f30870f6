"""An identifier from outside is either rejected at the entry, or unchanged after archive and restore."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.core.errors import BadBatch
from accountant.ledger.protocols import Receipt
from accountant.runtime.ingest import Ingest, decode
from accountant.storage.duckdb_ledger import DuckLedger, open_ledger
from accountant.storage.folder_or_object_store import in_folder
from agent.wire import Holder
from gputally.base.clock import VirtualClock
from tests.effort import examples
from tests.ledger.conftest import NOW_MS, START_MS, Hand

NUL = "0193\0'); DROP TABLE received; --"
ANY = st.text(max_size=30)  # of whole characters; half a surrogate pair is no text and has a test of its own


def body(batch: object, **changes: object) -> bytes:
    return json.dumps(msgspec.to_builtins(batch) | changes).encode()


@pytest.mark.parametrize("field", ["cluster", "node", "epoch", "boot_id"])
@pytest.mark.parametrize("text", [NUL, "a\nb", "a\n", "\x1b[2J", "a\x9bb", "x" * 2000])
def test_an_envelope_with_control_characters_is_refused(hand: Hand, field: str, text: str) -> None:
    with pytest.raises(BadBatch) as found:
        decode(body(hand.batch(hand.row(1)), **{field: text}))
    assert found.value.type == "invalid-batch"
    assert field in str(found.value)


@pytest.mark.parametrize("half", ["\ud800", "a\udfff"])
@pytest.mark.parametrize("place", ["node", "gpu", "holder", "label"])
def test_half_a_surrogate_pair_is_no_text(hand: Hand, place: str, half: str) -> None:
    holder = Holder(kind="pod", uid="u", namespace="n", name=half if place == "holder" else "p")
    row = hand.row(2, gpu=half if place == "gpu" else "gpu-1", holder=holder)
    batch = hand.batch(hand.fact(1, labels={"a": half if place == "label" else "b"}), row)
    with pytest.raises(BadBatch) as found:
        decode(body(batch, **({"node": half} if place == "node" else {})))
    assert found.value.type == "malformed-batch"
    assert "surrogate" in str(found.value)


@pytest.mark.parametrize("field", ["cluster", "node", "epoch"])
def test_it_is_refused_by_the_ledger_too(ledger: DuckLedger, hand: Hand, field: str) -> None:
    (result,) = ledger.append([hand.batch(hand.row(1), **{field: NUL})], NOW_MS)
    assert isinstance(result, BadBatch)
    assert field in str(result)


def test_an_epoch_is_a_uuid_or_what_an_import_writes(hand: Hand) -> None:
    for epoch in ("0199a3c0-7c00-7abc-8def-0123456789ab", "import:prometheus:01790812800000", "e"):
        assert decode(body(hand.batch(hand.row(1)), epoch=epoch)).epoch == epoch
    for epoch in ("", "a'b", "a b", "-a", "é", '"'):
        with pytest.raises(BadBatch):
            decode(body(hand.batch(hand.row(1)), epoch=epoch))


@pytest.mark.parametrize(
    "odd",
    [
        {"gpu": NUL},
        {"gpu_model": NUL},
        {"holder": Holder(kind="pod", uid=NUL)},
        {"holder": Holder(kind="pod", uid="u", name=NUL)},
        {"holder": Holder(kind="process", uid="u", container=NUL)},
    ],
)
def test_a_record_with_an_odd_name_is_set_aside_and_its_neighbours_are_not(
    ledger: DuckLedger, hand: Hand, odd: dict[str, Any]
) -> None:
    (result,) = ledger.append([hand.batch(hand.row(1, **odd), hand.row(2, 1, 2, gpu="gpu-2"))], NOW_MS)
    assert isinstance(result, Receipt)
    assert (result.stored, result.quarantined) == (1, 1)
    assert [record.reason for record in ledger.quarantined()] == ["bad-name"]


@pytest.mark.parametrize(
    "odd", [{"uid": NUL}, {"node": NUL}, {"workload": NUL}, {"labels": {"a": NUL}}, {"labels": {NUL: "a"}}]
)
def test_facts_with_an_odd_name_are_set_aside(ledger: DuckLedger, hand: Hand, odd: dict[str, Any]) -> None:
    ledger.append([hand.batch(hand.fact(1, **odd))], NOW_MS)
    assert [record.reason for record in ledger.quarantined()] == ["bad-name"]


def test_an_annotation_with_control_characters_is_left_out_and_the_facts_stay(hand: Hand) -> None:
    """The owner of an outbox must not prevent the node's facts about the pod from being stored."""
    fact = hand.fact(1, labels={"team": "red", "note": NUL, NUL: "a", "text": "two\nlines"}, requests={"gpu": "1\x1b"})
    (found,) = decode(body(hand.batch(fact))).facts
    assert (found.labels, found.requests) == ({"team": "red", "text": "two\nlines"}, {})


def figures(ledger: DuckLedger) -> object:
    by = ("cluster", "node", "namespace", "pod")
    return ledger.usage(START_MS, NOW_MS, by), ledger.quarantined(), ledger.holes()


@given(node=ANY, epoch=ANY, gpu=ANY, name=ANY, label=ANY)
@settings(max_examples=examples(20, 500), deadline=None)
def test_whatever_is_accepted_is_archived_and_restored(node: str, epoch: str, gpu: str, name: str, label: str) -> None:
    hand, clock = Hand(), VirtualClock(NOW_MS)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        ledger = open_ledger(place / "a.duckdb", clock, archive=in_folder(place / "archive"))
        ingest = Ingest(ledger, clock, linger_ms=0)
        holder = Holder(kind="pod", uid="u", namespace=name, name=name)
        plain = hand.batch(hand.fact(1, uid="u", labels={"a": label}), hand.row(2, gpu=gpu, holder=holder))
        changed: list[dict[str, object]] = [{"node": node}, {"epoch": epoch}]
        for changes in changed:
            with suppress(BadBatch):
                ingest.submit(body(plain, **changes)).result(30)
        ingest.submit(body(plain)).result(30)  # the envelope alone is refused
        ingest.close()
        assert ledger.archive(NOW_MS) is not None
        truth = figures(ledger)
        ledger.close()
        restored = open_ledger(place / "b.duckdb", clock, archive=in_folder(place / "archive"))
        assert figures(restored) == truth
        restored.close()


def test_an_archive_that_has_such_an_epoch_already_is_restored(tmp_path: Path, hand: Hand) -> None:
    path, archive = tmp_path / "a.duckdb", tmp_path / "it's an archive"
    ledger = open_ledger(path, VirtualClock(NOW_MS), archive=in_folder(archive))
    ledger.append([hand.batch(hand.row(1))], NOW_MS)
    ledger.close()
    with duckdb.connect(str(path)) as file:
        file.execute("UPDATE stream SET epoch = ?", [NUL])
    ledger = open_ledger(path, VirtualClock(NOW_MS), archive=in_folder(archive))
    assert ledger.archive(NOW_MS) is not None
    truth = figures(ledger)
    ledger.close()
    restored = open_ledger(tmp_path / "b.duckdb", VirtualClock(NOW_MS), archive=in_folder(archive))
    assert figures(restored) == truth
    assert set(restored.acks("n1", "prod")) == {NUL}
    restored.close()
