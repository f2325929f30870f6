"""Tokens for machines: made with scopes and an end, listed, and revoked while the accountant runs."""

from __future__ import annotations

import asyncio
import re
import stat
from pathlib import Path

import pytest
import yaml

from accountant.__main__ import main
from accountant.cli.server_commands import without
from gputally.base.clock import VirtualClock
from gputally.base.yaml_file import parse
from gputally.server.config_loading import validate
from gputally.server.tokens_and_grants import TokenFile, TokenList, Unauthenticated, sha256
from tests.http.conftest import NOW_MS


def made(capsys, *arguments):
    """A new token and its entry, as printed."""
    assert main(["token", "new", *arguments]) == 0
    out = capsys.readouterr().out
    found = re.search(r"only now:\n\n  (\S+)\n", out)
    assert found
    return found[1], out.partition("under `tokens:`:\n\n")[2]


@pytest.fixture
def file(tmp_path, capsys):
    """Two tokens between comments; their secrets by name."""
    ann, first = made(capsys, "--name", "ann", "--scope", "read", "--team", "vision", "--expires", "2099-01-01")
    bot, second = made(
        capsys, "--name", "bot", "--scope", "ingest", "--scope", "read", "--cluster", "prod", "--node", "n1"
    )
    path = tmp_path / "tokens.yaml"
    path.write_text(f"# whose they are\ntokens:\n{first}# machines\n{second}")
    path.chmod(0o640)
    return path, {"ann": ann, "bot": bot}


def test_a_list_says_who_may_what_until_when(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path, secrets = file
    assert main(["token", "list", "--file", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ann\s+read\s+teams vision\s+2099-01-01 00:00 UTC\s+valid", out)
    assert re.search(r"bot\s+ingest, read\s+cluster prod, node n1\s+no end\s+valid", out)
    assert not any(secret in out for secret in secrets.values())


def test_a_revoked_token_ends_while_the_others_go_on(file, capsys):
    path, secrets = file
    clock, faults = VirtualClock(NOW_MS), []
    way = TokenFile(path, clock, faults.append)
    for name, secret in secrets.items():
        assert asyncio.run(way.authenticate(secret)).name == name
    assert main(["token", "revoke", "ann", "--file", str(path)]) == 0
    assert "1 tokens are left" in capsys.readouterr().out
    assert "# whose they are" in path.read_text()
    assert "# machines" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    clock.advance(1_000)
    with pytest.raises(Unauthenticated, match="not known"):
        asyncio.run(way.authenticate(secrets["ann"]))
    assert asyncio.run(way.authenticate(secrets["bot"])).scopes == {"ingest", "read"}
    assert main(["token", "revoke", "ann", "--file", str(path)]) != 0
    assert "no token is named 'ann'" in capsys.readouterr().err
    assert faults == []


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
    for name, file in (("a", first), ("b", second)):
        words = ["--name", name, "--scope", "read", "--file", str(tokens), "--token-file", str(file)]
        assert main(["token", "new", *words]) == 0
    assert capsys.readouterr().out == ""
    known = {entry["name"]: entry["token_sha256"] for entry in yaml.safe_load(tokens.read_text())["tokens"]}
    assert known == {"a": sha256(first.read_text().strip()), "b": sha256(second.read_text().strip())}
    assert first.stat().st_mode & 0o077 == 0
    kept = first.read_text(), tokens.read_text()
    for name, file in (("c", first), ("a", tmp_path / "new.token")):
        words = ["--name", name, "--scope", "read", "--file", str(tokens), "--token-file", str(file)]
        assert main(["token", "new", *words]) == 2
    assert (first.read_text(), tokens.read_text()) == kept
    assert not (tmp_path / "new.token").exists()


def test_no_agents_token_is_made_for_any_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, secret = tmp_path / "tokens.yaml", tmp_path / "agents.token"
    whose = ["--name", "agents", "--scope", "ingest", "--cluster", "prod"]
    words = [*whose, "--file", str(file), "--token-file", str(secret)]
    assert main(["token", "new", *words]) == 2
    assert "the scope ingest and no node" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not file.exists()
    assert not secret.exists()
