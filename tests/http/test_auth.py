"""Tokens: hashed in the file, compared whole, expiring, re-read, never half taken."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import yaml

from gputally.base.yaml_file import FileFault
from gputally.server.tokens_and_grants import Principal, SingleToken, TokenFile, Unauthenticated, new_token


def ask(authenticator, token):
    return asyncio.run(authenticator.authenticate(token))


def entry(name, token, extra=""):
    return f"  - {{name: {name}, token_sha256: {hashlib.sha256(token.encode()).hexdigest()}, scopes: [read]{extra}}}\n"


@pytest.fixture
def tokens(tmp_path, clock):
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens:\n" + entry("one", "t1"))
    reported = []
    return path, TokenFile(path, clock, reported.append), reported


def test_a_token_is_found_by_its_hash(tokens):
    _, file, _ = tokens
    assert ask(file, "t1") == Principal("one", frozenset({"read"}))
    for token in (None, "", "t", "t11", hashlib.sha256(b"t1").hexdigest()):
        with pytest.raises(Unauthenticated):
            ask(file, token)


def test_a_token_expires(tmp_path, clock):
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens:\n" + entry("one", "t1", ", expires: 2026-11-01T12:00:01Z"))
    file = TokenFile(path, clock, lambda fault: None)
    assert ask(file, "t1").name == "one"
    clock.advance(1000)
    with pytest.raises(Unauthenticated, match="expired"):
        ask(file, "t1")


def test_the_file_is_read_again_when_it_changes(tokens, clock):
    path, file, reported = tokens
    path.write_text("tokens:\n" + entry("two", "t2"))
    assert ask(file, "t1").name == "one"  # looked at once a second at most
    clock.advance(1000)
    assert ask(file, "t2").name == "two"
    with pytest.raises(Unauthenticated):
        ask(file, "t1")
    assert reported == []


@pytest.mark.parametrize("broken", ["tokens:\n  - {name: x}\n", "tokens: [", "", None])
def test_a_broken_new_version_leaves_the_old_one_in_force(tokens, clock, broken):
    path, file, reported = tokens
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    clock.advance(1000)
    assert ask(file, "t1").name == "one"
    clock.advance(1000)
    assert ask(file, "t1").name == "one"
    assert len(reported) == 1
    assert str(path) in reported[0]


AGENT = f"  - {{name: a, token_sha256: {'a' * 64}, scopes: [read, ingest]}}\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tokens:\n  - {name: x, token_sha256: abc, scopes: [read]}\n", ":2: tokens.0.token_sha256"),
        ("tokens:\n" + entry("x", "a").replace("[read]", "[everything]"), ":2: tokens.0.scopes.0"),
        ("tokens:\n" + entry("x", "a").replace("[read]", "[]"), ":2: tokens.0.scopes"),
        ("tokens:\n" + entry("x", "a") + entry("x", "b"), ":1: tokens: token 'x' is listed twice"),
        ("tokens:\n" + entry("x", "a") + entry("y", "a"), ":1: tokens: token 'y' is listed twice"),
        (
            "tokens:\n" + entry("r", "b") + AGENT,
            ":3: tokens.1: token 'a' has the scope ingest and no cluster and node:",
        ),
        (
            "tokens:\n" + AGENT.replace("}", ", cluster: c}"),
            ":2: tokens.0: token 'a' has the scope ingest and no node:",
        ),
        (
            "tokens:\n" + AGENT.replace("}", ", node: n}"),
            ":2: tokens.0: token 'a' has the scope ingest and no cluster:",
        ),
        ("tokens:\n" + AGENT.replace("}", ", cluster: c, node: ''}"), ":2: tokens.0: token 'a' has the scope ingest"),
        (
            "tokens:\n" + entry("x", "a").replace("[read]", "[import]"),
            ":2: tokens.0: token 'x' has the scope import and",
        ),
        ("tokens:\n" + entry("x", "a", ", token: secret"), ":2: tokens.0.token: unknown key"),
        ("tokens:\n" + entry("x", "a", ", expires: 2026-01-01T00:00:00"), ":2: tokens.0.expires"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(tmp_path, clock, text, fault):
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(FileFault) as caught:
        TokenFile(path, clock, lambda fault: None)
    assert str(caught.value).startswith(f"{path}{fault}")


def test_a_new_token_works_and_is_not_in_its_entry(tmp_path, clock):
    token, text = new_token("agent", ("ingest",), cluster="prod", node="n1")
    assert token not in text
    assert len(token) >= 43
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens:\n" + text)
    assert ask(TokenFile(path, clock, lambda fault: None), token) == Principal(
        "agent", frozenset({"ingest"}), cluster="prod", node="n1"
    )
    assert yaml.safe_load(text)[0].keys() == {"name", "token_sha256", "scopes", "cluster", "node"}
    assert new_token("agent", ("ingest",), cluster="prod", node="n1")[0] != token


def test_one_secret_for_a_process_that_asks_itself():
    assert ask(SingleToken("s"), "s").may("admin")
    for token in (None, "", "x"):
        with pytest.raises(Unauthenticated):
            ask(SingleToken("s"), token)


def test_an_agents_token_for_any_node_says_what_to_do(tmp_path, clock):
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens:\n" + AGENT)
    advice = r"make one token for each node .*--node NODE.* projected service account tokens"
    with pytest.raises(FileFault, match=advice):
        TokenFile(path, clock, lambda fault: None)
