"""Whom the agent talks to and what it shows: its token, certificates of both sides, authorities that are renewed."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from agent.core.lean_http_client import Identity
from agent.core.settings import SettingsError
from agent.upload.uploader import BACKOFF_CAP_MS
from tests.agent_shell.outboxes import make_set
from tests.agent_shell.shipping import Shipping


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


def test_only_an_accountant_the_ca_file_vouches_for_is_talked_to(shipping: Shipping, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    key, certificate, ca_file = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "ca.pem"
    issued.private_key_pem.write_to_path(str(key))
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(str(ca_file))
    url = shipping.accountant.start_tls(certificate, key)
    shipping.append(make_set())
    stranger = shipping.uploader(url=url).ship()
    assert stranger.outcome == "retry"
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.detail
    assert shipping.batches == []
    assert shipping.uploader(url=url, ca_file=ca_file).ship().outcome == "accepted"
    shipping.append(make_set())
    wrong_name = shipping.uploader(url=url.replace("localhost", "127.0.0.1"), ca_file=ca_file).ship()
    assert "CERTIFICATE_VERIFY_FAILED" in wrong_name.detail
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    another = shipping.uploader(url=url, ca_file=tmp_path / "other.pem").ship()
    assert "CERTIFICATE_VERIFY_FAILED" in another.detail
    assert len(shipping.batches) == 1


def test_a_certificate_of_its_own_is_shown_and_a_renewed_one_from_then_on(shipping: Shipping, tmp_path: Path) -> None:
    authority, clients, strangers = trustme.CA(), trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    identity = Identity(tmp_path / "client.pem", tmp_path / "client-key.pem")

    def issue(by: trustme.CA, certificate: Path, key: Path) -> None:
        issued = by.issue_cert("localhost", common_name="agents-of-lab")
        issued.private_key_pem.write_to_path(str(key))
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    issue(authority, tmp_path / "cert.pem", tmp_path / "key.pem")
    issue(strangers, identity.cert, identity.key)
    url = shipping.accountant.start_tls(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "clients.pem")
    shipping.append(make_set())
    sender = shipping.uploader(url=url, ca_file=tmp_path / "ca.pem", identity=identity)
    assert sender.ship().outcome == "retry", "a stranger's certificate"
    assert shipping.uploader(url=url, ca_file=tmp_path / "ca.pem").ship().outcome == "retry", "none at all"
    identity.key.write_text("half of a renewal")
    shipping.clock.advance(BACKOFF_CAP_MS)
    assert sender.ship().outcome == "retry"
    issue(clients, identity.cert, identity.key)
    shipping.clock.advance(BACKOFF_CAP_MS)
    assert sender.ship().outcome == "accepted"
    assert len(shipping.batches) == 1
    with pytest.raises(SettingsError, match=r"client certificate .*nowhere\.pem: No such file"):
        shipping.uploader(url=url, identity=Identity(tmp_path / "nowhere.pem", identity.key))


def test_a_renewed_authority_is_trusted_without_a_restart(shipping: Shipping, tmp_path: Path) -> None:
    former, authority = trustme.CA(), trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    url = shipping.accountant.start_tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    former.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    sender = shipping.uploader(url=url, ca_file=tmp_path / "ca.pem")
    shipping.append(make_set())
    assert "CERTIFICATE_VERIFY_FAILED" in sender.ship().detail
    (tmp_path / "ca.pem").write_text("half of a renewal")
    shipping.clock.advance(BACKOFF_CAP_MS)
    assert "CERTIFICATE_VERIFY_FAILED" in sender.ship().detail
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    shipping.clock.advance(BACKOFF_CAP_MS)
    assert sender.ship().outcome == "accepted"


def test_urls_and_ca_files_that_cannot_work_are_refused_at_once(shipping: Shipping, tmp_path: Path) -> None:
    for url in ("ftp://host", "host:8080", "http://", "http://user@host", "http://host:port", "http://h/?q=1"):
        with pytest.raises(SettingsError, match="url"):
            shipping.uploader(url=url)
    with pytest.raises(SettingsError, match=r"CA file .*No such file"):
        shipping.uploader(url="https://host", ca_file=tmp_path / "none.pem")
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(SettingsError, match="CA file"):
        shipping.uploader(url="https://host", ca_file=tmp_path / "empty.pem")
