"""Runs `gputally dashboards`: `build` writes the JSON and YAML files, `check` compares them with the code and applies
the rules of `lint`, and `push` uploads the dashboards to Grafana.

The files exist twice: in `dashboards/generated/`, for Grafana's import and provisioning and for a plain Prometheus, and
inside the Helm chart, because a chart can only contain files of its own. Do not edit them by hand.

A push does not write a dashboard that Grafana already has in the same form, so a second push creates no new version. It
writes only gputally's own folder and uids. No message contains the token.

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

from dashboards import (
    cluster_dashboard,
    fairshare_dashboard,
    gpu_dashboard,
    health_dashboard,
    lint,
    prometheus_rules,
    team_dashboard,
)
from gputally.base.command_output import OUTPUTS, show

TIMEOUT_S = 30.0
MOST_BYTES = 16 << 20
"""Largest size of an answer."""
_REASONS = {
    401: "Grafana does not know the token, or the token has expired; create a new one",
    403: "the token lacks a permission; use that of a service account with the role Editor",
    412: "the dashboard was changed meanwhile; push again",
}
_SERVER_FIELDS = ("id", "version")
"""Fields that Grafana adds to a dashboard."""

Change = Literal["created", "replaced", "unchanged"]


class GrafanaError(Exception):
    """A request to Grafana failed. The message has one line: the request and the reason."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """The result for one dashboard."""

    title: str
    change: Change
    url: str


class Grafana:
    """A client of one Grafana server. Raises GrafanaError for an invalid URL, or a CA file that cannot be read.

    url: the server's root, with its path.
    token: the token of a service account."""

    def __init__(self, url: str, token: str, ca_file: Path | None = None) -> None:
        from gputally.base import http_calls

        parsed = http_calls.address(url, "https://grafana.example", GrafanaError)
        self._url = url.rstrip("/")
        self._token = token
        self._tls = http_calls.tls_context_for(parsed, ca_file, GrafanaError)

    def push(self, dashboards: Iterable[dict[str, Any]], folder: str) -> list[PushResult]:
        """Upload every dashboard to the folder with this title. Raises GrafanaError at the first failure."""
        uid = self._folder(folder)
        return [self._push(dashboard, uid) for dashboard in dashboards]

    def _folder(self, title: str) -> str:
        """Return the uid of the folder with this title, and create the folder if it does not exist."""
        for known in self._request("GET", "/api/folders?limit=1000"):
            if known.get("title") == title:
                return str(known["uid"])
        return str(self._request("POST", "/api/folders", {"title": title})["uid"])

    def _push(self, dashboard: dict[str, Any], folder: str) -> PushResult:
        path = f"/api/dashboards/uid/{quote(dashboard['uid'], safe='')}"
        known = self._request("GET", path, missing_is_none=True)
        title = str(dashboard["title"])
        if known is not None:
            meta = known.get("meta", {})
            if meta.get("provisioned"):
                raise GrafanaError(f"{title}: Grafana provisions this dashboard from a file; change the file there")
            same = _without_server_fields(known["dashboard"]) == _without_server_fields(dashboard)
            if same and meta.get("folderUid", "") == folder:
                return PushResult(title, "unchanged", self._url + str(meta.get("url", "")))
        body = {"dashboard": dashboard, "folderUid": folder, "overwrite": True, "message": "gputally dashboards push"}
        saved = self._request("POST", "/api/dashboards/db", body)
        return PushResult(title, "replaced" if known is not None else "created", self._url + str(saved.get("url", "")))

    def _request(self, method: str, path: str, body: object = None, *, missing_is_none: bool = False) -> Any:
        """Send a request and return the decoded answer; None for 404 if `missing_is_none`."""
        import httpx2

        from gputally.base import http_calls

        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        place = f"{method} {self._url}{path}"
        content = None if body is None else json.dumps(body)
        try:
            with (
                http_calls.client(self._tls, TIMEOUT_S) as client,
                client.stream(method, self._url + path, content=content, headers=headers) as answer,
            ):
                answer_body = http_calls.read_bounded(answer, MOST_BYTES) or b""
            if answer.status_code == 404 and missing_is_none:
                return None
            if not answer.is_success:
                reason = _REASONS.get(answer.status_code) or _error_message(answer_body, answer.reason_phrase)
                raise GrafanaError(f"{place}: {answer.status_code}, {reason}")
            return json.loads(answer_body)
        except httpx2.HTTPError as error:
            raise GrafanaError(f"{place}: {http_calls.reason(error)}") from error
        except ValueError as error:
            raise GrafanaError(f"{place}: {error}") from error


def _without_server_fields(dashboard: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in dashboard.items() if key not in _SERVER_FIELDS}


def _error_message(body: bytes, phrase: str) -> str:
    """Return Grafana's error message as one line, or else the HTTP reason phrase."""
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
    """Return the text of every generated file, by name."""
    return {f"{name}.json": render() for name, render in DASHBOARDS.items()} | {RULES: prometheus_rules.render_rules()}


def folders() -> list[Path]:
    """Return the folders of the files: that of this package, and in a checkout that of the chart."""
    return [GENERATED] + ([CHART / "dashboards"] if (CHART / "Chart.yaml").is_file() else [])


def build(folder: Path) -> list[Path]:
    """Write all files into `folder`, which is created if it does not exist. Return the files' paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files().items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def stale_files(folder: Path) -> list[str]:
    """Return the differences between the files in `folder` and the code, one line per file. Raises OSError if a file
    exists and cannot be read."""
    faults = []
    generated = files()
    for name, text in generated.items():
        try:
            committed = (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            faults.append(f"{folder / name}: missing")
            continue
        if committed != text:
            faults.append(f"{folder / name}: differs from the code")
    present = {path.name for kind in ("*.json", "*.yaml") for path in folder.glob(kind)}
    return faults + [f"{folder / name}: the code generates no such file" for name in sorted(present - set(generated))]


def check() -> list[str]:
    """Return all faults of the dashboards and of the committed files, one line each."""
    faults = [f"{name}: {fault}" for name, render in DASHBOARDS.items() for fault in lint.faults(json.loads(render()))]
    for folder in folders():
        faults += stale_files(folder)
    return faults


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    top = argparse.ArgumentParser(
        prog="gputally dashboards", description="Build, check and push dashboards and alerts."
    )
    commands = top.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="write the dashboards as JSON and the rules as YAML")
    builder.add_argument("--to", type=Path, metavar="DIR", help="write into DIR instead of the repository's folders")
    commands.add_parser("check", help="check that the committed files are up to date and follow the rules")
    pusher = commands.add_parser("push", help="upload the dashboards to a Grafana; equal ones are not written again")
    pusher.add_argument("--url", required=True, help="Grafana's address, for example https://grafana.example")
    pusher.add_argument(
        "--token-file", type=Path, required=True, metavar="FILE", help="file with the token of a service account"
    )
    pusher.add_argument("--folder", default="gputally", help="title of Grafana's folder (default: gputally)")
    pusher.add_argument("--output", choices=OUTPUTS, default="table", help="format in which the results are printed")
    pusher.add_argument("--ca-file", type=Path, metavar="FILE", help="PEM file of the CAs trusted for https")
    return top


def main(argv: Sequence[str]) -> int:
    """Run one command. Return 0 for success; 1 for faults that `check` finds, a file or folder that cannot be used, or
    a failed push to Grafana; 2 for a wrong call."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    try:
        if arguments.command == "build":
            return _build(arguments.to)
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
        return _fail(f"faults found: {len(faults)}; if files differ, run `gputally dashboards build`")
    print(
        f"{len(DASHBOARDS)} dashboards and {len(prometheus_rules.ALERTS)} alerts are up to date and follow all "
        f"{len(lint.RULES)} rules"
    )
    return 0


def _push(arguments: argparse.Namespace) -> int:
    from gputally.base import http_calls

    token = http_calls.read_token(arguments.token_file, GrafanaError)
    if not token:
        raise GrafanaError(f"{arguments.token_file}: the file is empty; write a service account's token into it")
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
