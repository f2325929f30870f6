"""The token file: hashed, compared whole, expiring, reread after a change; and the commands that edit it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import stat
from pathlib import Path

import pytest
import yaml

from accountant.__main__ import main
from accountant.cli.token_file import without
from gputally.base.yaml_file import FileFault, parse
from gputally.server.config_loading import validate
from gputally.server.tokens_and_grants import (
    Principal,
    SingleToken,
    TokenFile,
    TokenList,
    Unauthenticated,
    new_token,
    sha256,
)


def ask(authenticator, token):
    return asyncio.run(authenticator.authenticate(token))


def entry(name, token, extra=""):
    return f"  - {{name: {name}, token_sha256: {sha256(token)}, scopes: [read]{extra}}}\n"


@pytest.fixture
def token_file(tmp_path, clock):
    """A token file of these entries."""

    def build(entries, reported=None):
        path = tmp_path / "tokens.yaml"
        path.write_text("tokens:\n" + entries)
        return TokenFile(path, clock, (reported if reported is not None else []).append)

    return build


@pytest.fixture
def tokens(tmp_path, token_file):
    reported = []
    return tmp_path / "tokens.yaml", token_file(entry("one", "t1"), reported), reported


def test_a_token_is_found_by_its_hash(tokens):
    _, file, _ = tokens
    assert ask(file, "t1") == Principal("one", frozenset({"read"}))
    for token in (None, "", "t", "t11", hashlib.sha256(b"t1").hexdigest()):
        with pytest.raises(Unauthenticated):
            ask(file, token)


def test_a_token_expires(token_file, clock):
    file = token_file(entry("one", "t1", ", expires: 2026-11-01T12:00:01Z"))
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
        ("  - {name: x, token_sha256: abc, scopes: [read]}\n", ":2: tokens.0.token_sha256"),
        (entry("x", "a").replace("[read]", "[everything]"), ":2: tokens.0.scopes.0"),
        (entry("x", "a").replace("[read]", "[]"), ":2: tokens.0.scopes"),
        (entry("x", "a") + entry("x", "b"), ":1: tokens: token 'x' is listed twice"),
        (entry("x", "a") + entry("y", "a"), ":1: tokens: token 'y' is listed twice"),
        (entry("r", "b") + AGENT, ":3: tokens.1: token 'a' has the scope ingest and no cluster and node:"),
        (AGENT.replace("}", ", cluster: c}"), ":2: tokens.0: token 'a' has the scope ingest and no node:"),
        (AGENT.replace("}", ", node: n}"), ":2: tokens.0: token 'a' has the scope ingest and no cluster:"),
        (AGENT.replace("}", ", cluster: c, node: ''}"), ":2: tokens.0: token 'a' has the scope ingest"),
        (entry("x", "a").replace("[read]", "[import]"), ":2: tokens.0: token 'x' has the scope import and"),
        (
            entry("x", "a", ", teams: [vision]").replace("[read]", "[admin]"),
            ":2: tokens.0: token 'x' has teams and the",
        ),
        (entry("x", "a", ", teams: [v]").replace("[read]", "[read, policy]"), ":2: tokens.0: token 'x' has teams and"),
        (entry("x", "a", ", token: secret"), ":2: tokens.0.token: unknown key"),
        (entry("x", "a", ", expires: 2026-01-01T00:00:00"), ":2: tokens.0.expires"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(tmp_path, token_file, text, fault):
    with pytest.raises(FileFault) as caught:
        token_file(text)
    assert str(caught.value).startswith(f"{tmp_path / 'tokens.yaml'}{fault}")


def test_a_new_token_works_and_is_not_in_its_entry(token_file):
    token, text = new_token("agent", ("ingest",), cluster="prod", node="n1")
    assert token not in text
    assert len(token) >= 43
    assert ask(token_file(text), token) == Principal("agent", frozenset({"ingest"}), cluster="prod", node="n1")
    assert yaml.safe_load(text)[0].keys() == {"name", "token_sha256", "scopes", "cluster", "node"}
    assert new_token("agent", ("ingest",), cluster="prod", node="n1")[0] != token


def test_one_secret_for_a_process_that_asks_itself():
    assert ask(SingleToken("s"), "s").may("admin")
    for token in (None, "", "x"):
        with pytest.raises(Unauthenticated):
            ask(SingleToken("s"), token)


def test_an_agents_token_for_any_node_says_what_to_do(token_file):
    advice = r"make one token for each node .*--node NODE.* projected service account tokens"
    with pytest.raises(FileFault, match=advice):
        token_file(AGENT)


def made(capsys, *arguments):
    """A new token and its entry, as printed."""
    assert main(["token", "new", *arguments]) == 0
    out = capsys.readouterr().out
    found = re.search(r"only now:\n\n  (\S+)\n", out)
    assert found
    return found[1], out.partition("under `tokens:`:\n\n")[2]


@pytest.fixture
def listed(tmp_path, capsys):
    """Two tokens between comments; returns their secrets by name."""
    ann, first = made(capsys, "--name", "ann", "--scope", "read", "--team", "vision", "--expires", "2099-01-01")
    bot, second = made(
        capsys, "--name", "bot", "--scope", "ingest", "--scope", "read", "--cluster", "prod", "--node", "n1"
    )
    path = tmp_path / "tokens.yaml"
    path.write_text(f"# whose they are\ntokens:\n{first}# machines\n{second}")
    path.chmod(0o640)
    return path, {"ann": ann, "bot": bot}


def test_a_list_says_who_may_what_until_when(listed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path, secrets = listed
    assert main(["token", "list", "--file", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ann\s+read\s+teams vision\s+2099-01-01 00:00 UTC\s+valid", out)
    assert re.search(r"bot\s+ingest, read\s+cluster prod, node n1\s+no end\s+valid", out)
    assert not any(secret in out for secret in secrets.values())


def test_a_revoked_token_ends_while_the_others_go_on(listed, clock, capsys):
    path, secrets = listed
    faults = []
    way = TokenFile(path, clock, faults.append)
    for name, secret in secrets.items():
        assert ask(way, secret).name == name
    assert main(["token", "revoke", "ann", "--file", str(path)]) == 0
    assert f"ann is revoked. Tokens left in {path}: 1" in capsys.readouterr().out
    assert "# whose they are" in path.read_text()
    assert "# machines" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    clock.advance(1_000)
    with pytest.raises(Unauthenticated, match="not known"):
        ask(way, secrets["ann"])
    assert ask(way, secrets["bot"]).scopes == {"ingest", "read"}
    assert main(["token", "revoke", "ann", "--file", str(path)]) != 0
    assert "no token is named 'ann'" in capsys.readouterr().err
    assert faults == []


def test_a_token_that_cannot_be_written_gets_no_entry(tmp_path, capsys):
    file, missing = tmp_path / "tokens.yaml", tmp_path / "missing" / "token"
    words = ["token", "new", "--name", "ann", "--scope", "read", "--file", str(file), "--token-file", str(missing)]
    assert main(words) == 1
    assert f"{missing}: No such file or directory" in capsys.readouterr().err
    assert not file.exists()


ENTRY = "{{name: {0}, token_sha256: '{1}', scopes: [read]}}"


@pytest.mark.parametrize("gone", ["a", "b", "c"])
@pytest.mark.parametrize("style", ["flow", "block"])
def test_only_the_entrys_own_lines_go(gone, style):
    digests = {"a": "1" * 64, "b": "2" * 64, "c": "3" * 64}
    if style == "flow":
        entries = [f"  - {ENTRY.format(name, digest)}\n" for name, digest in digests.items()]
    else:
        entries = [
            f"- name: {name}\n  token_sha256: '{digest}'\n  scopes:\n  - read\n" for name, digest in digests.items()
        ]
    left = without("# top\ntokens:\n" + "".join(entries) + "# end\n", gone)
    found = validate(parse(left, "tokens.yaml"), TokenList)
    assert [entry.name for entry in found.tokens] == [name for name in digests if name != gone]
    assert left.startswith("# top\n")
    assert left.endswith("# end\n")


def test_the_last_one_leaves_an_empty_list_and_a_shared_line_is_refused():
    one = f"tokens:\n  - {ENTRY.format('a', '1' * 64)}\n"
    assert validate(parse(without(one, "a"), "tokens.yaml"), TokenList).tokens == ()
    both = f"tokens: [{ENTRY.format('a', '1' * 64)}, {ENTRY.format('b', '2' * 64)}]\n"
    with pytest.raises(ValueError, match="share a line"):
        without(both, "a")


def test_a_token_goes_into_files_that_nobody_loses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens, first, second = tmp_path / "tokens.yaml", tmp_path / "a.token", tmp_path / "b.token"
    for name, listed in (("a", first), ("b", second)):
        words = ["--name", name, "--scope", "read", "--file", str(tokens), "--token-file", str(listed)]
        assert main(["token", "new", *words]) == 0
    assert capsys.readouterr().out == ""
    known = {entry["name"]: entry["token_sha256"] for entry in yaml.safe_load(tokens.read_text())["tokens"]}
    assert known == {"a": sha256(first.read_text().strip()), "b": sha256(second.read_text().strip())}
    assert first.stat().st_mode & 0o077 == 0
    kept = first.read_text(), tokens.read_text()
    for name, listed in (("c", first), ("a", tmp_path / "new.token")):
        words = ["--name", name, "--scope", "read", "--file", str(tokens), "--token-file", str(listed)]
        assert main(["token", "new", *words]) == 2
    assert (first.read_text(), tokens.read_text()) == kept
    assert not (tmp_path / "new.token").exists()


def test_no_agents_token_is_made_for_any_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, secret = tmp_path / "tokens.yaml", tmp_path / "agents.token"
    whose = ["--name", "agents", "--scope", "ingest", "--cluster", "prod"]
    words = [*whose, "--file", str(listed), "--token-file", str(secret)]
    assert main(["token", "new", *words]) == 2
    assert "the scope ingest and no node" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not listed.exists()
    assert not secret.exists()
