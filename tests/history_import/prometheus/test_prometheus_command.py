"""`gputally import prometheus`: one line for a user's mistake, and for a server that does not answer as it must."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trustme

from accountant.__main__ import main
from accountant.histories.prometheus.chunk_queries import PrometheusFailed, read_series
from gputally.base.prometheus_api import Prometheus
from gputally.testing.http_server import Handler, listening

START_MS = 1_790_812_800_000
HEADING = "Cluster|JobIDRaw|JobID|JobName|Account|User|Partition|Submit|Start|End|State|NodeList|AllocTRES"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prometheus", "ftp://x"], "not an address"),
        (["prometheus", "http://x", "--start", "soon"], "--start: "),
        (["prometheus", "http://x", "--start", "2099-01-01T00:00Z"], "there is no full hour between"),
        (["prometheus", "http://x", "--chunk", "90m"], "whole hours"),
        (["prometheus", "http://x", "--source-header", "oops"], "write NAME: VALUE"),
    ],
)
def test_what_people_get_wrong_is_one_line(arguments, said, capsys):
    assert main(["import", *arguments]) == 1
    err = capsys.readouterr().err.strip()
    assert said in err.replace("--since: ", "--start: ")
    assert "Traceback" not in err


class _Prometheus(Handler):
    answer: tuple[int, bytes]
    asked: list[tuple[str, str, str]]

    def do_POST(self):
        body = self.content().decode()
        self.asked.append((self.path, self.headers.get("Authorization", ""), body))
        self.say(*self.answer)


@contextmanager
def answering(
    status: int, answer: object, context: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    handler = type("Handler", (_Prometheus,), {"answer": (status, raw), "asked": []})
    with listening(handler, context) as url:
        yield url, handler.asked


def test_a_prometheus_is_asked_with_its_token_and_credentials_are_never_shown(tmp_path):
    result = [{"metric": {"pod": "a"}, "values": [[60, "0.5"], [120.5, "NaN"]]}]
    (tmp_path / "token").write_text("secret\n")
    with answering(200, {"status": "success", "data": {"resultType": "matrix", "result": result}}) as (url, asked):
        server = Prometheus(f"{url}/base/", PrometheusFailed, token_file=tmp_path / "token")
        (one,) = read_series(server, "up", 60_000, 120_000, 60_000)
        assert (dict(one.labels), list(one.times), one.values[0]) == ({"pod": "a"}, [60_000, 120_500], 0.5)
        assert asked[0][:2] == ("/base/api/v1/query_range", "Bearer secret")
        assert asked[0][2] == "query=up&start=60.000&end=120.000&step=60.000"
        named = Prometheus(url.replace("//", "//ann:p%40ss@"), PrometheusFailed)
        named.instant("up", 0)
        assert asked[1][1] == "Basic YW5uOnBAc3M="
        assert named.origin == url
        with pytest.raises(ValueError, match="11000 points"):
            named.range("up", 0, 11_001 * 60_000, 60_000)


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (400, {"status": "error", "error": "parse error"}, "parse error"),
        (401, b"who are you", "401: the bearer token is missing"),
        (404, b"<html>", "status 404"),
        (200, b"<html>", "the answer is not that of a Prometheus server"),
    ],
)
def test_what_a_prometheus_may_answer_instead(status, answer, said):
    with answering(status, answer) as (url, _), pytest.raises(PrometheusFailed, match=said):
        Prometheus(url, PrometheusFailed).instant("up", 0)


def test_a_prometheus_without_gpus_is_said_to_have_none(capsys):
    with answering(200, {"status": "success", "data": {"result": []}}) as (url, _):
        assert main(["import", "prometheus", url]) == 1
    assert "no GPU series of dcgm-exporter or kube-state-metrics was scraped" in capsys.readouterr().err


def test_over_tls_the_authority_has_to_be_known(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with answering(200, {"status": "success", "data": {"result": []}}, context) as (url, _):
        assert Prometheus(url, PrometheusFailed, ca_file=tmp_path / "ca.pem").instant("up", 0) == []
        with pytest.raises(PrometheusFailed, match="CERTIFICATE_VERIFY_FAILED"):
            Prometheus(url, PrometheusFailed).instant("up", 0)


def test_nobody_listens(capsys):
    assert main(["import", "prometheus", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9: Connection refused" in capsys.readouterr().err
