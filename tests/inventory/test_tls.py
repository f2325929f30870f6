"""HTTPS with the accountant's certificate, agents by client certificate, and files that are reread after a change."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path

import pytest
import trustme

import gputally
from accountant.__main__ import main
from accountant.composition import Service
from accountant.core.settings import Settings, load
from agent.wire import Batch
from gputally.base.accountant_connection import Unanswered
from gputally.base.errors import SettingsFault
from gputally.base.yaml_file import FileFault, Unreadable, read
from gputally.server.config_loading import WatchedFile
from gputally.server.https_server import BadCertificate, Tls, TlsFiles, common_name, serve
from gputally.server.tokens_and_grants import sha256
from tests.file_descriptor_limit import no_file_descriptors

pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def issue(ca: trustme.CA, folder: Path, name: str = "127.0.0.1", common: str | None = None) -> tuple[Path, Path]:
    issued = ca.issue_cert(name, common_name=common)
    folder.mkdir(exist_ok=True)
    certificate, key = folder / "tls.crt", folder / "tls.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return certificate, key


def request(
    url: str, context: ssl.SSLContext, method: str, path: str, body: bytes | None = None, token: str = ""
) -> tuple[int, dict[str, object]]:
    host, _, port = url.removeprefix("https://").partition(":")
    connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=10)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def client(ca: trustme.CA, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


def batch(cluster: str, node: str = "n1") -> bytes:
    import msgspec

    return msgspec.json.encode(
        Batch(cluster=cluster, node=node, boot_id="b", epoch="0192-a", first_seq=1, oldest_seq=1)
    )


def test_https_bearer_tokens_and_client_certificates_on_one_port(ca, tmp_path, clock):
    certificate, key = issue(ca, tmp_path / "server")
    authority = tmp_path / "ca.pem"
    authority.write_bytes(ca.cert_pem.bytes())
    tokens, callers = tmp_path / "tokens.yaml", tmp_path / "callers.yaml"
    tokens.write_text(f"tokens:\n  - {{name: root, token_sha256: {sha256('secret')}, scopes: [admin]}}\n")
    callers.write_text("schema: 1\ncertificates:\n  - {name: lab-agents, cluster: lab, node: n1}\n")
    settings = Settings(
        data=tmp_path, listen="127.0.0.1:0", tokens=tokens, callers=callers, tls_cert=certificate, tls_key=key,
        tls_client_ca=authority,
    )  # fmt: skip
    with Service(settings, clock) as service, serve(service.app, "127.0.0.1", 0, service.tls) as url:
        assert url.startswith("https://")
        plain, agents = client(ca), client(ca, issue(ca, tmp_path / "lab", "lab", "lab-agents"))
        assert request(url, plain, "GET", "/v1/audit")[0] == 401
        status, trail = request(url, plain, "GET", "/v1/audit", token="secret")
        assert (status, trail) == (200, {"acts": [], "broken_at": None, "next_after": None})
        assert request(url, agents, "POST", "/v1/usage", batch("lab"))[0] == 200
        status, problem = request(url, agents, "POST", "/v1/usage", batch("prod"))
        assert (status, str(problem["type"]).rsplit("/", 1)[1]) == (403, "wrong-origin")
        assert request(url, agents, "GET", "/v1/usage")[0] == 403
        nobody = client(ca, issue(ca, tmp_path / "other", "other", "somebody"))
        assert request(url, nobody, "POST", "/v1/usage", batch("lab"))[0] == 401
        foreign = trustme.CA()
        with pytest.raises((ssl.SSLError, OSError)):
            request(url, client(ca, issue(foreign, tmp_path / "foreign", "x", "lab-agents")), "GET", "/livez")
        with pytest.raises(ssl.SSLCertVerificationError):
            request(url, client(foreign), "GET", "/livez")


def test_the_python_client_trusts_the_authority_that_it_is_given(ca, tmp_path, clock):
    certificate, key = issue(ca, tmp_path / "server")
    authority, tokens = tmp_path / "ca.pem", tmp_path / "tokens.yaml"
    authority.write_bytes(ca.cert_pem.bytes())
    tokens.write_text(f"tokens:\n  - {{name: root, token_sha256: {sha256('secret')}, scopes: [admin]}}\n")
    settings = Settings(data=tmp_path, listen="127.0.0.1:0", tokens=tokens, tls_cert=certificate, tls_key=key)
    with Service(settings, clock) as service, serve(service.app, "127.0.0.1", 0, service.tls) as url:
        assert gputally.connect(url, "secret", ca_file=authority).decisions().empty
        with pytest.raises(Unanswered, match=r"(?i)certificate"):
            gputally.connect(url, "secret").decisions()


def test_a_renewed_certificate_is_used_and_half_a_pair_is_not(ca, tmp_path):
    certificate, key = issue(ca, tmp_path / "server")
    tls = Tls(TlsFiles(certificate, key))
    assert not tls.renew()
    fresh = ca.issue_cert("127.0.0.1")
    certificate.write_bytes(fresh.cert_chain_pems[0].bytes())
    with pytest.raises(BadCertificate, match="not a certificate and its key"):
        tls.renew()
    assert not tls.renew()
    assert tls.refused
    key.write_bytes(fresh.private_key_pem.bytes())
    assert tls.renew()
    assert not tls.refused
    assert not tls.renew()


def test_a_renewed_authority_of_clients_is_in_force_for_new_connections(ca, tmp_path, clock):
    certificate, key = issue(ca, tmp_path / "server")
    old, new, authority = trustme.CA(), trustme.CA(), tmp_path / "clients.pem"
    authority.write_bytes(old.cert_pem.bytes())
    tls = Tls(TlsFiles(certificate, key, authority))
    settings = Settings(data=tmp_path / "data", auth="off", linger_ms=0)
    of_old = client(ca, issue(old, tmp_path / "old", "old", "agent"))
    of_new = client(ca, issue(new, tmp_path / "new", "new", "agent"))

    def passes(context: ssl.SSLContext) -> bool:
        try:
            return request(url, context, "GET", "/livez")[0] == 200
        except OSError:
            return False

    with Service(settings, clock) as service, serve(service.app, "127.0.0.1", 0, tls, renew=True) as url:
        assert (passes(of_old), passes(of_new)) == (True, False)
        authority.write_text("no certificate")
        assert (passes(of_old), passes(of_new)) == (True, False), "the last good one stays"
        assert tls.refused
        authority.write_bytes(new.cert_pem.bytes())
        assert (passes(of_old), passes(of_new)) == (False, True)
        assert not tls.refused
        assert passes(client(ca)), "a certificate is not required"


def test_a_renewal_that_cannot_be_used_is_said_on_the_accountants_page(ca, tmp_path, clock):
    certificate, key = issue(ca, tmp_path / "server")
    settings = Settings(data=tmp_path / "data", auth="off", linger_ms=0, tls_cert=certificate, tls_key=key)
    with Service(settings, clock) as service:
        said = 'gputally_upkeep_failing{{task="certificate"}} {}.0\n'
        assert said.format(0) in service.metrics.exposition().decode()
        certificate.write_bytes(ca.issue_cert("127.0.0.1").cert_chain_pems[0].bytes())
        clock.advance(600_000)
        service.maintain()
        assert said.format(1) in service.metrics.exposition().decode()


def test_files_that_cannot_be_used_are_named(ca, tmp_path):
    certificate, key = issue(ca, tmp_path / "server")
    with pytest.raises(BadCertificate, match="nowhere"):
        Tls(TlsFiles(tmp_path / "nowhere", key))
    with pytest.raises(BadCertificate, match="nowhere"):
        Tls(TlsFiles(certificate, key, tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ((), ""),
        (((("organizationName", "o"),), (("commonName", "a"),)), "a"),
        (((("commonName", "a"),), (("commonName", "b"),)), ""),
    ],
)
def test_of_a_subject_with_several_names_none_counts(subject, name):
    assert common_name({"subject": subject}) == name
    assert common_name(None) == ""


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"tls_cert": "a"}, "--tls-cert: tls_cert and tls_key go together"),
        ({"tls_client_ca": "a"}, "--tls-client-ca: client certificates need HTTPS: set tls_cert and tls_key"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(flags, fault):
    with pytest.raises(SettingsFault, match=fault):
        load(None, {}, {"auth": "off", **flags})


def test_the_commands_trust_whom_they_are_told_to(ca, tmp_path, clock, capsys):
    certificate, key = issue(ca, tmp_path / "server")
    authority, empty = tmp_path / "ca.pem", tmp_path / "empty.pem"
    ca.cert_pem.write_to_path(str(authority))
    empty.touch()
    settings = Settings(
        data=tmp_path / "data", auth="off", listen="127.0.0.1:0", linger_ms=0, tls_cert=certificate, tls_key=key
    )
    with Service(settings, clock) as service, serve(service.app, settings.host, settings.port, tls=service.tls) as url:
        assert main(["months", "--url", url, "--ca-file", str(authority)]) == 0
        assert "2026" in capsys.readouterr().out
        for arguments, message in (
            ((), "certificate verify failed"),
            (("--ca-file", str(empty)), f"CA file {empty}: it contains no certificate"),
            (("--ca-file", str(tmp_path / "none.pem")), "No such file"),
        ):
            assert main(["months", "--url", url, *arguments]) == 1
            err = capsys.readouterr().err
            assert message in err
            assert err.count("\n") == 1


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Path, WatchedFile[object], list[str]]:
    """A valid file with one number, and the reports about it."""
    path, told = tmp_path / "file.yaml", list[str]()
    path.write_text("n: 1\n")

    def number(path: Path) -> object:
        document = read(path)
        if not isinstance(document.data, dict) or "n" not in document.data:
            raise FileFault([f"{document.place(())}: no n"])
        return document.data["n"]

    return path, WatchedFile(path, number, told.append), told


def test_a_bad_version_is_told_once_and_changes_nothing(watched):
    path, file, told = watched
    path.write_text("m: 22\n")
    assert [file.check(), file.check(), file.current, file.refused] == [False, False, 1, True]
    assert told == [f"{path}:1: no n"]
    path.write_text("n: 333\n")
    assert [file.check(), file.check(), file.current, file.refused] == [True, False, 333, False]


def test_what_cannot_be_read_is_told_once_and_tried_again(watched):
    path, file, told = watched
    path.write_text("n: 22\n")
    with no_file_descriptors():
        assert [file.check(), file.check(), file.current, file.refused] == [False, False, 1, True]
    assert told == [f"{path}: Too many open files"]
    assert [file.check(), file.check(), file.current, file.refused] == [True, False, 22, False]
    path.unlink()
    assert [file.check(), file.check(), file.current] == [False, False, 22]
    assert told[1:] == [f"{path}: No such file or directory"]
    path.write_text("m: 4444\n")  # there again, and bad: another fault
    assert [file.check(), file.check()] == [False, False]
    assert len(told) == 3


def test_a_first_version_that_cannot_be_read_is_a_fault(tmp_path):
    with pytest.raises(Unreadable, match="No such file"):
        WatchedFile(tmp_path / "none.yaml", read, print)
