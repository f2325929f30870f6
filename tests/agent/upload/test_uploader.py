"""At-least-once upload to a real HTTP server with scripted answers; tokens and certificates."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent.core.lean_http_client import ClientCertificate
from agent.core.settings import SettingsError
from agent.upload.spool import Outbox
from agent.upload.uploader import (
    ASK_MS,
    BACKOFF_BASE_MS,
    BACKOFF_CAP_MS,
    RETRY_AFTER_CAP_MS,
    ClockOrigins,
    ShipResult,
    Uploader,
)
from agent.wire import Ack, Batch
from gputally.base.clock import VirtualClock
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR
from gputally.base.version import __version__
from tests.agent.records import make_facts, make_set
from tests.agent.sample_values import T0
from tests.agent.scripted_accountant import Reply, ScriptedAccountant, Shipping, accept, drain, refuse
from tests.file_size_limit import limited_files
from tests.real.programs import free_ports

OTHER = "https://proxy.example/problems/blocked"


def test_a_batch_says_where_it_comes_from_and_covers_its_numbers(shipping: Shipping) -> None:
    shipping.append(make_set(rows=2), make_set(), facts=[make_facts("p1")])
    shipping.outbox.park(4, "invalid-batch")
    assert shipping.uploader().ship() == ShipResult("accepted", rows=4)
    (batch,) = shipping.batches
    assert (batch.schema, batch.cluster, batch.node, batch.boot_id) == (1, "c1", "n1", "boot-1")
    assert (batch.epoch, batch.first_seq, batch.oldest_seq) == (shipping.outbox.epoch, 1, 1)
    numbers = [[record.seq for record in records] for records in (batch.facts, batch.intervals, batch.skipped)]
    assert numbers == [[1], [2, 3], [4]]
    (headers,) = shipping.accountant.headers
    assert [headers[name] for name in ("path", "Content-Type", "Content-Encoding")] == [
        "/v1/usage", "application/json", "gzip",
    ]  # fmt: skip
    assert "Authorization" not in headers


def test_idle_without_records_and_without_an_accountant(shipping: Shipping) -> None:
    assert shipping.uploader().ship().outcome == "idle"
    shipping.append(make_set())
    assert shipping.uploader(url="").ship().outcome == "idle"


def test_sent_records_leave_although_nothing_new_is_sent(shipping: Shipping) -> None:
    """The checkpoint that contains them comes later than the answer to them."""
    shipping.append(make_set(), make_set())
    ship = shipping.uploader()
    assert [result.outcome for result in drain(ship)] == ["accepted", "idle"]
    shipping.accountant.script = lambda batch: accept(batch, checkpointed=2)
    shipping.clock.advance(ASK_MS - 1)
    assert ship.ship().outcome == "idle"
    assert shipping.outbox.stats().rows == 2
    shipping.clock.advance(1)
    assert [(result.outcome, result.rows) for result in drain(ship)] == [("accepted", 0), ("idle", 0)]
    assert shipping.outbox.stats().rows == 0
    asked = shipping.batches[-1]
    assert (asked.first_seq, asked.oldest_seq, asked.intervals, asked.facts, asked.skipped) == (3, 1, (), (), ())
    shipping.clock.advance(ASK_MS)
    assert ship.ship().outcome == "idle", "nothing is left to ask about"


def test_an_accountant_that_lost_records_is_noticed_although_nothing_new_is_sent(shipping: Shipping) -> None:
    shipping.append(make_set(), make_set())
    drain(ship := shipping.uploader())
    shipping.accountant.script = lambda batch: (
        accept(batch)
        if batch.intervals
        else refuse(409, "sequence-gap", ack=Ack(epoch=batch.epoch, durable_seq=0, checkpointed_seq=0))
    )
    shipping.clock.advance(ASK_MS)
    assert [result.outcome for result in drain(ship)] == ["rewound", "accepted", "idle"]
    assert [row.seq for row in shipping.batches[-1].intervals] == [1, 2]


@pytest.mark.parametrize("status", [400, 413, 422, 503])
def test_a_refused_question_changes_nothing(shipping: Shipping, status: int) -> None:
    shipping.append(make_set())
    drain(ship := shipping.uploader())
    shipping.refuse(status, "some-problem")
    shipping.clock.advance(ASK_MS)
    assert ship.ship().outcome == "retry"
    assert (shipping.outbox.stats().rows, shipping.outbox.stats().parked) == (1, 0)


def test_a_new_numbering_of_the_records_keeps_what_dated_them(shipping: Shipping) -> None:
    """The accountant has records that an old copy of the spool does not know. Then the clock is corrected."""
    origins = ClockOrigins(shipping.outbox, "boot-1")
    origins.set_accountant(T0)
    shipping.append(make_set(T0), make_set(T0))
    shipping.outbox.acknowledge(Ack(epoch=shipping.outbox.epoch, durable_seq=2, checkpointed_seq=2))
    for origin_ms in (T0 + MS_PER_DAY, T0 - MS_PER_HOUR, T0):
        origins.date_following(origin_ms)
        newest = origins.newest
        assert newest is not None
        shipping.outbox.append([make_set(origin_ms)], [], None, newest.id)
    shipping.outbox.acknowledge(Ack(epoch=shipping.outbox.epoch, durable_seq=900, checkpointed_seq=0))
    for again in (origins, ClockOrigins(shipping.outbox, "boot-1")):
        again.redate(T0)
        drain(shipping.uploader())
        assert [(row.seq, row.start_ms) for row in shipping.batches[0].intervals] == [(1, T0), (2, T0), (3, T0)]
    assert ClockOrigins(shipping.outbox, "boot-2").redate(T0) == ({}, 0)


def test_origins_of_a_spool_that_cannot_be_opened_yet_are_stored_later(
    open_outbox: Callable[..., Outbox], clock: VirtualClock
) -> None:
    open_outbox().close()
    with limited_files(0):
        outbox = open_outbox("late/outbox.sqlite", patient=True)
        uploader = Uploader(outbox, "", "c1", "n1", "boot-1", None, clock)
        assert (uploader.origins.newest, uploader.origins.agrees(T0)) == (None, None)
        uploader.origins.date_following(T0)
        newest = uploader.origins.newest
    uploader.origins.store()
    assert ClockOrigins(outbox, "boot-1").newest == newest


def test_many_batches_use_one_connection_and_bound_each(shipping: Shipping) -> None:
    shipping.append(*(make_set(rows=3) for _ in range(20)))
    results = drain(shipping.uploader(max_rows=10))
    assert [r.outcome for r in results] == ["accepted"] * 7 + ["idle"]
    assert all(len(batch.intervals) <= 10 for batch in shipping.batches)
    assert len(shipping.accountant.connections) == 1


def test_a_kept_connection_that_was_closed_is_opened_again_at_once(shipping: Shipping) -> None:
    shipping.accountant.hang_up = True
    shipping.append(*(make_set() for _ in range(3)))
    assert [r.outcome for r in drain(shipping.uploader(max_rows=1))] == ["accepted"] * 3 + ["idle"]


@pytest.mark.parametrize(("status", "body"), [
    (401, {"type": "ours"}),
    (403, {"type": "ours"}),
    (429, {"type": "ours"}),
    (500, {"type": "ours"}),
    (503, {"type": "ours"}),
    (503, b""),
    (502, '{"type": "Passerelle fermée"}'.encode("latin-1")),
    (200, '{"epoch": "fermée"}'.encode("latin-1")),
    (502, b"[" * 100_000),
    (400, b"<html>Bad Request</html>"),
    (422, {"type": OTHER}),
    (409, {"type": OTHER, "ack": {"epoch": "x", "durable_seq": 1, "checkpointed_seq": 1}}),
    (413, b"<html>too large</html>"),
    (404, {"type": "ours"}),
    (415, {"type": "ours"}),
    (302, b""),
    (200, b"<html>please log in</html>"),
    (200, {"epoch": "another", "durable_seq": 1, "checkpointed_seq": 1}),
    (200, b""),
])  # fmt: skip
def test_what_is_not_a_verdict_on_a_record_drops_nothing(shipping: Shipping, status: int, body: Any) -> None:
    shipping.append(make_set())
    ours = isinstance(body, dict) and body.get("type") == "ours"
    shipping.reply(refuse(status, "some-problem") if ours else Reply(status, body))
    ship = shipping.uploader()
    result = ship.ship()
    assert (result.outcome, result.retry_in_ms) == ("retry", BACKOFF_BASE_MS)
    assert ship.ship() == ShipResult("waiting", retry_in_ms=BACKOFF_BASE_MS)
    assert len(shipping.batches) == 1
    shipping.accountant.script = accept
    shipping.clock.advance(BACKOFF_BASE_MS)
    assert ship.ship().outcome == "accepted"
    first, again = shipping.batches
    assert first.agent is not None
    assert first.agent.version == __version__
    assert again.sent_ms == first.sent_ms + BACKOFF_BASE_MS
    assert structs.replace(again, sent_ms=None) == structs.replace(first, sent_ms=None)


def test_an_accountant_that_is_not_there_is_retried(shipping: Shipping) -> None:
    (port,) = free_ports(1)
    shipping.append(make_set())
    result = shipping.uploader(url=f"http://127.0.0.1:{port}").ship()
    assert result.outcome == "retry"
    assert "Connection refused" in result.detail


def test_back_off_doubles_up_to_a_cap_and_begins_again_after_success(shipping: Shipping) -> None:
    shipping.append(make_set())
    shipping.refuse(503, "ledger-unavailable")
    ship = shipping.uploader()
    delays = []
    for _ in range(12):
        delays.append(ship.ship().retry_in_ms)
        shipping.clock.advance(delays[-1])
    assert delays[:9] == [1_000 * 2**n for n in range(9)]
    assert delays[9:] == [BACKOFF_CAP_MS] * 3
    shipping.accountant.script = accept
    assert ship.ship().outcome == "accepted"
    shipping.append(make_set())
    shipping.refuse(503, "ledger-unavailable")
    assert ship.ship().retry_in_ms == BACKOFF_BASE_MS


@pytest.mark.parametrize(("retry_after", "jitter", "expected"), [
    ("120", 1.0, 120_000),
    ("999999999999", 1.0, RETRY_AFTER_CAP_MS),
    (formatdate(1_790_812_890, usegmt=True), 1.0, 90_000),
    (formatdate(1_790_812_000, usegmt=True), 1.0, BACKOFF_BASE_MS),
    ("Mon, 01 Jan 0001 00:00:00 +2359", 1.0, BACKOFF_BASE_MS),
    ("soon", 1.0, BACKOFF_BASE_MS),
    ("-5", 1.0, BACKOFF_BASE_MS),
    ("", 0.25, BACKOFF_BASE_MS // 4),
])  # fmt: skip
def test_retry_after_is_obeyed_within_reason_and_jitter_spreads_over_the_whole_delay(
    shipping: Shipping, retry_after: str, jitter: float, expected: int
) -> None:
    shipping.append(make_set())
    shipping.reply(Reply(429, b"", {"Retry-After": retry_after}))
    assert shipping.uploader(jitter=lambda: jitter).ship().retry_in_ms == expected


@pytest.mark.parametrize("ours", [True, False])
def test_413_is_split_down_to_one_set_whoever_says_it(shipping: Shipping, ours: bool) -> None:
    shipping.append(*(make_set(rows=2) for _ in range(8)))
    too_large = refuse(413, "too-large") if ours else Reply(413, b"<html>413</html>")
    shipping.accountant.script = lambda batch: too_large if len(batch.intervals) > 4 else accept(batch)
    results = drain(shipping.uploader())
    assert [r.outcome for r in results].count("accepted") >= 4
    assert sum(r.rows for r in results) == 16
    assert shipping.outbox.stats().parked == 0


def test_a_set_that_is_too_large_alone_is_parked_not_retried_for_ever(shipping: Shipping) -> None:
    shipping.append(make_set(), make_set(rows=5), make_set())
    shipping.accountant.script = lambda batch: refuse(413, "too-large") if len(batch.intervals) > 4 else accept(batch)
    ship = shipping.uploader()
    drain(ship)
    assert shipping.outbox.durable_seq == 7
    assert dict(ship.parked) == {"too-large": 5}


def test_409_goes_back_to_where_the_accountant_is(shipping: Shipping) -> None:
    shipping.append(*(make_set() for _ in range(6)))
    shipping.outbox.acknowledge(Ack(epoch=shipping.outbox.epoch, durable_seq=4, checkpointed_seq=0))
    marks = {"epoch": shipping.outbox.epoch, "durable_seq": 1, "checkpointed_seq": 1}
    gap = refuse(409, "sequence-gap", ack=marks)
    shipping.accountant.script = lambda batch: gap if batch.first_seq == 5 else accept(batch)
    results = drain(shipping.uploader())
    assert [r.outcome for r in results] == ["rewound", "accepted", "idle"]
    assert [b.first_seq for b in shipping.batches] == [5, 2]
    assert shipping.batches[1].oldest_seq == 2


def test_409_that_leads_nowhere_backs_off_instead_of_spinning(shipping: Shipping) -> None:
    shipping.append(make_set())
    marks = {"epoch": shipping.outbox.epoch, "durable_seq": 0, "checkpointed_seq": 0}
    shipping.refuse(409, "sequence-gap", ack=marks)
    assert shipping.uploader().ship().outcome == "retry"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=st.sets(st.integers(0, 19), max_size=5), sizes=st.lists(st.integers(1, 3), min_size=20, max_size=20))
def test_exactly_the_undecodable_sets_are_parked_and_everything_else_arrives(
    tmp_path_factory: pytest.TempPathFactory, accountant: ScriptedAccountant, bad: set[int], sizes: list[int]
) -> None:
    clock = VirtualClock(1)
    outbox = Outbox(tmp_path_factory.mktemp("spool") / "outbox.sqlite", clock, fsync=False)
    outbox.append([make_set(n * 60_000, rows=size) for n, size in enumerate(sizes)], [], None)

    def script(batch: Batch) -> Any:
        if any(row.start_ms // 60_000 in bad for row in batch.intervals):
            return refuse(400 + 22 * (batch.first_seq % 2), "malformed-batch")
        arrived.update(row.start_ms // 60_000 for row in batch.intervals)
        return accept(batch)

    arrived: set[int] = set()
    accountant.script = script
    uploader = Uploader(outbox, accountant.url, "c", "n", "b", None, clock, jitter=lambda: 1.0)
    results = drain(uploader)
    assert results[-1].outcome == "idle"
    assert arrived == set(range(20)) - bad
    assert outbox.durable_seq == sum(sizes)
    assert outbox.stats().parked == sum(sizes[n] for n in bad)
    assert uploader.parked.total() == sum(sizes[n] for n in bad)
    uploader.close()
    outbox.close()


def test_when_the_envelope_is_refused_nothing_stays_parked(shipping: Shipping) -> None:
    shipping.append(*(make_set() for _ in range(8)))
    shipping.refuse(422, "invalid-batch")
    ship = shipping.uploader()
    for _ in range(50):
        shipping.clock.advance(ship.ship().retry_in_ms)
    assert shipping.outbox.stats().parked <= 1
    assert not ship.parked
    ship = shipping.uploader()  # restarted, perhaps with one set parked for nothing
    for _ in range(10):
        shipping.clock.advance(ship.ship().retry_in_ms)
    while shipping.outbox.stats().parked:
        shipping.clock.advance(ship.ship().retry_in_ms)
    shipping.accountant.script = accept
    shipping.clock.advance(BACKOFF_CAP_MS)
    drain(ship)
    assert shipping.outbox.durable_seq == 8
    assert not ship.parked
    assert all(not batch.skipped for batch in shipping.batches[-3:])


def test_a_path_before_the_route_is_kept(shipping: Shipping) -> None:
    shipping.append(make_set())
    shipping.uploader(url=shipping.accountant.url + "/gputally/").ship()
    assert shipping.accountant.headers[0]["path"] == "/gputally/v1/usage"


def test_an_answer_larger_than_any_of_ours_is_not_swallowed(shipping: Shipping) -> None:
    shipping.append(make_set())
    shipping.reply(Reply(200, b" " * 2_000_000))
    result = shipping.uploader().ship()
    assert result.outcome == "retry"
    assert "larger than" in result.detail


def test_the_token_is_read_again_when_the_file_changes(shipping: Shipping, tmp_path: Path) -> None:
    token = tmp_path / "token"
    ship = shipping.uploader(token_file=token)
    shipping.append(make_set())
    missing = ship.ship()
    assert missing.outcome == "retry"
    assert "token: No such file or directory" in missing.detail
    token.write_text("first-token\n")
    shipping.clock.advance(missing.retry_in_ms)
    assert ship.ship().outcome == "accepted"
    token.write_text("second.token==\n")
    shipping.append(make_set())
    ship.ship()
    replacement = tmp_path / "next"
    replacement.write_text("third--token==\n")
    replacement.replace(token)  # how a projected token rotates
    shipping.append(make_set())
    ship.ship()
    assert [h["Authorization"] for h in shipping.accountant.headers] == [
        "Bearer first-token", "Bearer second.token==", "Bearer third--token==",
    ]  # fmt: skip


def test_a_token_over_plain_http_is_warned_about(
    shipping: Shipping, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipping.uploader()
    shipping.uploader(url="https://host", token_file=tmp_path / "token")
    assert caplog.text == ""
    shipping.uploader(token_file=tmp_path / "token")
    assert "the token travels unencrypted" in caplog.text


@pytest.mark.parametrize("text", ["", "two words", "evil\r\nX-Header: 1", "x" * 70_000])
def test_a_token_that_is_none_is_never_sent_nor_shown(
    shipping: Shipping, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(text)
    shipping.append(make_set())
    assert shipping.uploader(token_file=tmp_path / "token").ship().outcome == "retry"
    assert shipping.batches == []
    assert not text or text not in caplog.text


def issue(by: trustme.CA, folder: Path, name: str = "server") -> tuple[Path, Path]:
    """Write a certificate for `localhost` and its key to files of that name."""
    issued = by.issue_cert("localhost", common_name="agents-of-lab")
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    issued.private_key_pem.write_to_path(str(key))
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return certificate, key


def trusted(authority: trustme.CA, path: Path) -> Path:
    authority.cert_pem.write_to_path(str(path))
    return path


def test_only_an_accountant_the_ca_file_vouches_for_is_talked_to(shipping: Shipping, tmp_path: Path) -> None:
    authority = trustme.CA()
    url, ca_file = shipping.accountant.start_tls(*issue(authority, tmp_path)), trusted(authority, tmp_path / "ca.pem")
    other = trusted(trustme.CA(), tmp_path / "other.pem")
    shipping.append(make_set())
    for wrong in (
        {"url": url},
        {"url": url.replace("localhost", "127.0.0.1"), "ca_file": ca_file},
        {"url": url, "ca_file": other},
    ):
        refused = shipping.uploader(**wrong).ship()
        assert refused.outcome == "retry"
        assert "CERTIFICATE_VERIFY_FAILED" in refused.detail
    assert shipping.batches == []
    assert shipping.uploader(url=url, ca_file=ca_file).ship().outcome == "accepted"


def test_a_certificate_of_its_own_is_shown_and_a_renewed_one_from_then_on(shipping: Shipping, tmp_path: Path) -> None:
    authority, clients, strangers = trustme.CA(), trustme.CA(), trustme.CA()
    ca_file = trusted(authority, tmp_path / "ca.pem")
    identity = ClientCertificate(*issue(strangers, tmp_path, "client"))
    url = shipping.accountant.start_tls(*issue(authority, tmp_path), trusted(clients, tmp_path / "clients.pem"))
    shipping.append(make_set())
    sender = shipping.uploader(url=url, ca_file=ca_file, identity=identity)
    assert sender.ship().outcome == "retry", "a stranger's certificate"
    assert shipping.uploader(url=url, ca_file=ca_file).ship().outcome == "retry", "none at all"
    identity.key.write_text("half of a renewal")
    shipping.clock.advance(BACKOFF_CAP_MS)
    assert sender.ship().outcome == "retry"
    issue(clients, tmp_path, "client")
    shipping.clock.advance(BACKOFF_CAP_MS)
    assert sender.ship().outcome == "accepted"
    assert len(shipping.batches) == 1
    with pytest.raises(SettingsError, match=r"client certificate .*nowhere\.pem: No such file"):
        shipping.uploader(url=url, identity=ClientCertificate(tmp_path / "nowhere.pem", identity.key))


def test_a_renewed_authority_is_trusted_without_a_restart(shipping: Shipping, tmp_path: Path) -> None:
    authority = trustme.CA()
    url = shipping.accountant.start_tls(*issue(authority, tmp_path))
    ca_file = trusted(trustme.CA(), tmp_path / "ca.pem")
    sender = shipping.uploader(url=url, ca_file=ca_file)
    shipping.append(make_set())
    assert "CERTIFICATE_VERIFY_FAILED" in sender.ship().detail
    ca_file.write_text("half of a renewal")
    shipping.clock.advance(BACKOFF_CAP_MS)
    assert "CERTIFICATE_VERIFY_FAILED" in sender.ship().detail
    trusted(authority, ca_file)
    shipping.clock.advance(BACKOFF_CAP_MS)
    assert sender.ship().outcome == "accepted"


@pytest.mark.parametrize(("url", "ca_file", "fault"), [
    *((url, None, "url") for url in (
        "ftp://host", "host:8080", "http://", "http://user@host", "http://host:port", "http://[::1", "http://h/?q=1",
        "http://:word@host", "http://h/#fragment")),
    ("http://user:word@host", None, r"url 'http://user:\*\*\*@host': expected http"),
    ("http://user:w#rd@host", None, r"url 'http://user:\*\*\*@host': expected http"),
    ("https://host", "none.pem", r"CA file .*No such file"),
    ("https://host", "empty.pem", "CA file"),
])  # fmt: skip
def test_urls_and_ca_files_that_cannot_work_are_refused_at_once(
    shipping: Shipping, tmp_path: Path, url: str, ca_file: str | None, fault: str
) -> None:
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(SettingsError, match=fault):
        shipping.uploader(url=url, ca_file=ca_file and tmp_path / ca_file)
