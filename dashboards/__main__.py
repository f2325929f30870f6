"""Runs `gputally dashboards build, check, push`: writes the JSON and YAML files, compares them with the code, uploads
them.

The files exist twice: in `dashboards/generated/`, for Grafana's import and provisioning and for a plain Prometheus, and
inside the Helm chart, because a chart can only contain files of its own. Do not edit them by hand.

A push is idempotent: a dashboard in Grafana that already equals ours is not written, so a second push creates no new
version. Only our own folder and uids are written. The token is never shown.

Source of the calls: Grafana's HTTP API reference (`/api/folders`, `/api/dashboards`), valid for Grafana 9 to 13."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx2

from dashboards import (
    cluster_dashboard,
    fairshare_dashboard,
    gpu_dashboard,
    health_dashboard,
    lint,
    prometheus_rules,
    team_dashboard,
)
from gputally.base import http_calls
from gputally.base.command_line import OUTPUTS, show

TIMEOUT_S = 30.0
MOST_BYTES = 16 << 20
"""Maximum size of an answer."""
_REASONS = {
    401: "the token is not known there, or has expired",
    403: "the token may not do this; a service account with the role Editor may",
    412: "it was changed meanwhile",
}
_SERVERS_OWN = ("id", "version")
"""Fields that Grafana adds to a dashboard."""

Change = Literal["created", "replaced", "unchanged"]


class GrafanaError(Exception):
    """A request to Grafana failed; a one-line message says which, and why."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """The result for one dashboard."""

    title: str
    change: Change
    url: str


class Grafana:
    """One Grafana server. url: its root, including a path. token: of a service account."""

    def __init__(self, url: str, token: str, ca_file: Path | None = None) -> None:
        """Raises GrafanaError for an invalid URL, or a CA file that cannot be read."""
        parsed = http_calls.address(url, "https://grafana.example", GrafanaError)
        self._url = url.rstrip("/")
        self._token = token
        self._trusted = http_calls.tls_context_for(parsed, ca_file, GrafanaError)

    def push(self, dashboards: Iterable[dict[str, Any]], folder: str) -> list[PushResult]:
        """Uploads every dashboard to `folder` (its title). Raises GrafanaError at the first failure."""
        uid = self._folder(folder)
        return [self._push(dashboard, uid) for dashboard in dashboards]

    def _folder(self, title: str) -> str:
        """The uid of the folder with this title, which is created if it does not exist."""
        for known in self._ask("GET", "/api/folders?limit=1000"):
            if known.get("title") == title:
                return str(known["uid"])
        return str(self._ask("POST", "/api/folders", {"title": title})["uid"])

    def _push(self, dashboard: dict[str, Any], folder: str) -> PushResult:
        path = f"/api/dashboards/uid/{quote(dashboard['uid'], safe='')}"
        known = self._ask("GET", path, missing_is_none=True)
        title = str(dashboard["title"])
        if known is not None:
            meta = known.get("meta", {})
            if meta.get("provisioned"):
                raise GrafanaError(f"{title}: it comes from a file on that server; change the file there")
            if _plain(known["dashboard"]) == _plain(dashboard) and meta.get("folderUid", "") == folder:
                return PushResult(title, "unchanged", self._url + str(meta.get("url", "")))
        body = {"dashboard": dashboard, "folderUid": folder, "overwrite": True, "message": "gputally dashboards push"}
        done = self._ask("POST", "/api/dashboards/db", body)
        return PushResult(title, "replaced" if known is not None else "created", self._url + str(done.get("url", "")))

    def _ask(self, method: str, path: str, body: object = None, *, missing_is_none: bool = False) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        place = f"{method} {self._url}{path}"
        content = None if body is None else json.dumps(body)
        try:
            with (
                http_calls.client(self._trusted, TIMEOUT_S) as client,
                client.stream(method, self._url + path, content=content, headers=headers) as answer,
            ):
                found = http_calls.read_bounded(answer, MOST_BYTES)
            if answer.status_code == 404 and missing_is_none:
                return None
            if not answer.is_success:
                why = _REASONS.get(answer.status_code) or _words(found or b"", answer.reason_phrase)
                raise GrafanaError(f"{place}: {answer.status_code}, {why}")
            return json.loads(found or b"")
        except httpx2.HTTPError as error:
            raise GrafanaError(f"{place}: {http_calls.reason(error)}") from error
        except ValueError as error:
            raise GrafanaError(f"{place}: {error}") from error


def _plain(dashboard: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in dashboard.items() if key not in _SERVERS_OWN}


def _words(body: bytes, phrase: str) -> str:
    """Grafana's error message, as one line."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = phrase
    return " ".join(str(message).split())[:300]


DASHBOARDS: Mapping[str, Callable[[], str]] = {
    "cluster": cluster_dashboard.render,
    "team": team_dashboard.render,
    "gpu": gpu_dashboard.render,
    "fairshare": fairshare_dashboard.render,
    "health": health_dashboard.render,
}
"""File name without extension -> function that renders the content."""

RULES = "rules.yaml"
GENERATED = Path(__file__).parent / "generated"
CHART = Path(__file__).parent.parent / "helm" / "gputally"


def files() -> dict[str, str]:
    """Name -> text of every generated file."""
    return {f"{name}.json": render() for name, render in DASHBOARDS.items()} | {RULES: prometheus_rules.render_rules()}


def folders() -> list[Path]:
    """The folders of the files: this package, and the chart in a checkout."""
    return [GENERATED] + ([CHART / "dashboards"] if (CHART / "Chart.yaml").is_file() else [])


def build(folder: Path) -> list[Path]:
    """Writes all files into `folder`, creating it; returns the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files().items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def stale_files(folder: Path) -> list[str]:
    """The differences between `folder` and the code, one line per file. Raises OSError if a file cannot be read for
    another reason than being absent."""
    faults = []
    wanted = files()
    for name, text in wanted.items():
        try:
            committed = (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            faults.append(f"{folder / name}: missing")
            continue
        if committed != text:
            faults.append(f"{folder / name}: not what the code gives")
    found = {path.name for kind in ("*.json", "*.yaml") for path in folder.glob(kind)}
    return faults + [f"{folder / name}: nothing of this name is generated" for name in sorted(found - set(wanted))]


def check() -> list[str]:
    """All faults of the dashboards and of the committed files, one line each."""
    faults = [f"{name}: {fault}" for name, render in DASHBOARDS.items() for fault in lint.faults(json.loads(render()))]
    for folder in folders():
        faults += stale_files(folder)
    return faults


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    top = argparse.ArgumentParser(
        prog="gputally dashboards", description="Build, check and push dashboards and alerts."
    )
    commands = top.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="write the dashboards as JSON and the rules as YAML")
    builder.add_argument("--out", type=Path, metavar="DIR", help="write into DIR instead of the repository's folders")
    commands.add_parser("check", help="say whether the committed files are fresh and keep the rules")
    pusher = commands.add_parser("push", help="put the dashboards into a Grafana; what is there already is left alone")
    pusher.add_argument("--url", required=True, help="Grafana's address, as https://grafana.example")
    pusher.add_argument("--token-file", type=Path, required=True, metavar="FILE", help="a service account's token")
    pusher.add_argument("--folder", default="gputally", help="title of the folder (default: gputally)")
    pusher.add_argument("--output", choices=OUTPUTS, default="table", help="how to print what became of each")
    pusher.add_argument("--ca-file", type=Path, metavar="FILE", help="authorities trusted for https, PEM")
    return top


def main(argv: Sequence[str]) -> int:
    """Runs one command. Returns 0; 1 for faults found by `check`, an unusable folder, or a failed request to Grafana; 2
    for wrong usage."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    try:
        if arguments.command == "build":
            return _build(arguments.out)
        if arguments.command == "push":
            return _push(arguments)
        return _check()
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")
    except GrafanaError as error:
        return _fail(str(error))


def _build(out: Path | None) -> int:
    for folder in [out] if out else folders():
        for path in build(folder):
            print(path)
    return 0


def _check() -> int:
    faults = check()
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return _fail(f"{len(faults)} faults; `gputally dashboards build` renews the files")
    print(f"{len(DASHBOARDS)} dashboards and {len(prometheus_rules.ALERTS)} alerts fresh, {len(lint.RULES)} rules kept")
    return 0


def _push(arguments: argparse.Namespace) -> int:
    token = arguments.token_file.read_text(encoding="utf-8").strip()
    if not token:
        raise GrafanaError(f"{arguments.token_file}: empty, a service account's token is wanted")
    server = Grafana(arguments.url, token, arguments.ca_file)
    pushed = server.push((json.loads(render()) for render in DASHBOARDS.values()), arguments.folder)
    if arguments.output != "table":
        show(arguments.output, lambda: "", [asdict(one) for one in pushed])
        return 0
    width = max(len(one.title) for one in pushed)
    for one in pushed:
        print(f"{one.title:<{width}}  {one.change:<9}  {one.url}")
    return 0


def _fail(reason: str) -> int:
    print(f"gputally dashboards: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
