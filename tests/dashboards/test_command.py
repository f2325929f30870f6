"""`gputally dashboards build|check`, the freshness of the committed files, and `push` to a small server that imitates
Grafana's HTTP API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dashboards import __main__
from dashboards.__main__ import DASHBOARDS, main
from gputally.testing.http_server import Handler, listening

TOKEN = "glsa_secret"


def test_what_is_committed_is_what_the_code_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert "are up to date and follow all" in capsys.readouterr().out


def test_the_chart_carries_the_same_files() -> None:
    assert __main__.CHART / "dashboards" in __main__.folders()
    for name in __main__.files():
        ours, theirs = __main__.GENERATED / name, __main__.CHART / "dashboards" / name
        assert ours.read_bytes() == theirs.read_bytes()


def test_build_writes_where_it_is_told_and_nowhere_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--to", str(tmp_path / "new")]) == 0
    files = sorted((tmp_path / "new").iterdir())
    assert [f.name for f in files] == sorted(__main__.files())
    assert sorted(capsys.readouterr().out.split()) == [str(f) for f in files]
    assert __main__.stale_files(tmp_path / "new") == []


def test_stale_missing_and_forgotten_files_are_named(tmp_path: Path) -> None:
    __main__.build(tmp_path)
    file = tmp_path / "cluster.json"
    shutil.copy(file, tmp_path / "old.json")
    file.write_text(file.read_text() + " ")
    assert __main__.stale_files(tmp_path) == [
        f"{file}: differs from the code",
        f"{tmp_path / 'old.json'}: the code generates no such file",
    ]
    file.unlink()
    assert f"{file}: missing" in __main__.stale_files(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["build", "--to", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"gputally dashboards: {tmp_path / 'file'}: File exists\n"


# --- push ---------------------------------------------------------------------------------------


@dataclass
class StandIn:
    """Folders and dashboards by uid, with Grafana's checks: token, unknown folder, provisioned, own fields."""

    folders: dict[str, str] = field(default_factory=dict)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    provisioned: set[str] = field(default_factory=set)
    writes: list[str] = field(default_factory=list)
    broken: tuple[int, bytes] | None = None

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Any]:
        if self.broken is not None:
            return self.broken
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key"}
        if method == "POST":
            self.writes.append(path)
        where = path.partition("?")[0]
        match method, where.split("/")[2:]:
            case "GET", ["folders"]:
                return 200, [{"uid": uid, "title": title} for uid, title in self.folders.items()]
            case "POST", ["folders"]:
                uid = f"folder{len(self.folders)}"
                self.folders[uid] = body["title"]
                return 200, {"uid": uid, "title": body["title"]}
            case "GET", ["dashboards", "uid", uid]:
                if uid not in self.dashboards:
                    return 404, {"message": "Dashboard not found"}
                return 200, self.dashboards[uid]
            case "POST", ["dashboards", "db"]:
                return self._save(body)
        return 404, {"message": "no such route"}

    def _save(self, body: Any) -> tuple[int, Any]:
        given = body["dashboard"]
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        known = self.dashboards.get(given["uid"])
        if known is not None and not body["overwrite"]:
            return 412, {"message": "The dashboard has been changed by someone else"}
        version = 1 if known is None else known["dashboard"]["version"] + 1
        url = f"/d/{given['uid']}"
        meta = {"folderUid": body["folderUid"], "url": url, "provisioned": given["uid"] in self.provisioned}
        self.dashboards[given["uid"]] = {"dashboard": given | {"id": 7, "version": version}, "meta": meta}
        return 200, {"uid": given["uid"], "url": url, "version": version, "status": "success"}


@dataclass(frozen=True)
class Running:
    grafana: StandIn
    url: str
    arguments: list[str]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    grafana = StandIn()

    class Grafana(Handler):
        def do_GET(self) -> None:
            content = self.content()
            body = json.loads(content) if content else None
            status, answer = grafana.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            self.say(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        do_POST = do_GET

    (tmp_path / "token").write_text(TOKEN + "\n")
    with listening(Grafana) as url:
        yield Running(grafana, url, ["push", "--url", url + "/", "--token-file", str(tmp_path / "token")])


def test_everything_lands_in_one_folder(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(running.arguments) == 0
    assert set(running.grafana.dashboards) == {json.loads(render())["uid"] for render in DASHBOARDS.values()}
    assert running.grafana.folders == {"folder0": "gputally"}
    assert {d["meta"]["folderUid"] for d in running.grafana.dashboards.values()} == {"folder0"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["gputally", "/", "Cluster", "created", f"{running.url}/d/gputally-cluster"]
    assert len({line.index("created") for line in lines}) == 1


def test_a_second_push_writes_nothing(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(running.arguments) == 0
    running.grafana.writes.clear()
    capsys.readouterr()
    assert main(running.arguments) == 0
    assert running.grafana.writes == []
    assert all("unchanged" in line for line in capsys.readouterr().out.splitlines())


def test_what_differs_is_replaced_and_the_rest_left_alone(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(running.arguments) == 0
    running.grafana.dashboards["gputally-team"]["dashboard"]["title"] = "changed by hand"
    running.grafana.dashboards["gputally-gpu"]["meta"]["folderUid"] = "elsewhere"
    capsys.readouterr()
    assert main(running.arguments) == 0
    changes = [line.split()[-2] for line in capsys.readouterr().out.splitlines()]
    assert sorted(changes) == ["replaced", "replaced", "unchanged", "unchanged", "unchanged"]
    assert running.grafana.dashboards["gputally-team"]["dashboard"]["title"] == "gputally / Team"


def test_a_folder_of_that_title_is_used(running: Running) -> None:
    running.grafana.folders["mine"] = "Platform"
    assert main([*running.arguments, "--folder", "Platform"]) == 0
    assert running.grafana.folders == {"mine": "Platform"}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            (403, b'{"message": "denied"}'),
            "403, the token lacks a permission; use that of a service account with the role Editor",
        ),
        ((500, b'{"message": "database is\\n locked"}'), "500, database is locked"),
        ((502, b"<html>"), "502, Bad Gateway"),
        ((200, b"<html>"), "Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_refusal_is_one_line_with_the_call(
    running: Running, capsys: pytest.CaptureFixture[str], broken: tuple[int, bytes], said: str
) -> None:
    running.grafana.broken = broken
    assert main(running.arguments) == 1
    told = capsys.readouterr().err
    assert told == f"gputally dashboards: GET {running.url}/api/folders?limit=1000: {said}\n"
    assert TOKEN not in told


def test_what_became_of_each_for_programs(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*running.arguments, "--output", "csv"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading == "title,change,url"
    assert len(lines) == len(DASHBOARDS)
    assert all(running.url in line for line in lines)


def test_a_wrong_token_is_told(running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("another")
    assert main(running.arguments) == 1
    assert "401, Grafana does not know the token, or the token has expired" in capsys.readouterr().err


def test_a_dashboard_from_a_file_of_the_server_is_not_fought_over(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    running.grafana.provisioned.add("gputally-cluster")
    assert main(running.arguments) == 0
    assert main(running.arguments) == 1
    assert "gputally / Cluster: Grafana provisions this dashboard from a file" in capsys.readouterr().err


def test_what_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token, missing = tmp_path / "token", tmp_path / "missing"
    token.write_text(" \n")
    call = ["push", "--url", "http://127.0.0.1:9", "--token-file"]
    assert main([*call, str(missing)]) == 1
    assert main([*call, str(token)]) == 1
    token.write_bytes(b"\xff")
    assert main([*call, str(token)]) == 1
    token.write_text("t")
    assert main([*call, str(token)]) == 1
    assert main([*call, str(token), "--ca-file", str(missing)]) == 1
    assert main(["push", "--url", "grafana", "--token-file", str(token)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"gputally dashboards: token file {missing}: No such file or directory",
        f"gputally dashboards: {token}: the file is empty; write a service account's token into it",
        f"gputally dashboards: token file {token}: not ASCII text",
        "gputally dashboards: GET http://127.0.0.1:9/api/folders?limit=1000: Connection refused",
        f"gputally dashboards: CA file {missing}: No such file or directory",
        "gputally dashboards: not an address: 'grafana' (write for example https://grafana.example)",
    ]
    assert main(["push"]) == 2
