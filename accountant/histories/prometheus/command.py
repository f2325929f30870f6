"""`import prometheus`: its options, its messages and its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Option

from accountant.history_import.protocol import Asked, CannotImport, End, HistoryPlugin, Import
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND


def imports(
    asked: Asked,
    source: Annotated[str, Argument(metavar="URL", help="URL of a Prometheus, or of a service with its HTTP API.")],
    start: Annotated[str, Option(help="Start of the history: 30d or 12h before its end, a date or RFC 3339.")] = "30d",
    end: End = None,
    cluster: Annotated[str, Option(help="Name of the cluster in the ledger, the same as in its agents.")] = "default",
    match: Annotated[str, Option(help="Further label matchers, for example 'cluster=\"prod\"'.")] = "",
    scheduler: Annotated[str, Option(help="Scheduler of GPU pods, if kube_pod_scheduler is not scraped.")] = "",
    label: Annotated[list[str] | None, Option(help="Label of pods that may name a team (repeatable).")] = None,
    chunk: Annotated[
        str | None,
        Option(help="Span of one query in whole hours, such as 6h (default: by devices)."),
    ] = None,
    source_token_file: Annotated[Path | None, Option(help="File with the bearer token for URL.")] = None,
    source_ca_file: Annotated[Path | None, Option(help="CA certificates to trust for URL, PEM.")] = None,
    source_header: Annotated[list[str] | None, Option(help="HTTP header for URL, NAME: VALUE (repeatable).")] = None,
) -> Iterator[Import]:
    """Import usage from the metrics of dcgm-exporter and kube-state-metrics. Can be interrupted and repeated without
    duplicates. Exit 1 if a part of the history was left out."""
    from accountant.histories.prometheus.chunk_queries import PrometheusFailed, PrometheusHistory
    from gputally.base.prometheus_api import Prometheus

    end_ms = asked.end(end)
    start_ms = asked.start(start, end_ms)
    if start_ms >= end_ms:
        raise CannotImport(f"--start {start}: there is no full hour between this and the end: give an earlier instant")
    server = Prometheus(
        source,
        PrometheusFailed,
        token_file=source_token_file,
        ca_file=source_ca_file,
        headers=dict(map(_header, source_header or ())),
    )
    history = PrometheusHistory(server, match=match, scheduler=scheduler, team_labels=label or ())
    length = _chunk(chunk) if chunk is not None else history.chunk_ms(end_ms)
    yield Import(cluster, server.origin, history.read, (start_ms, end_ms), length)
    for name in sorted(history.unknown):
        asked.tell(f"{server.origin}: pods request {name}, and nothing says whether it is a GPU: it is not imported")


def _duration_ms(text: str) -> int | None:
    """A duration in milliseconds; None if the text is no duration."""
    from gputally.server.config_loading import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError:
        return None
    return seconds * MS_PER_SECOND if isinstance(seconds, int) and seconds > 0 else None


def _chunk(text: str) -> int:
    length = _duration_ms(text)
    if length is None or length % MS_PER_HOUR or length > 7 * MS_PER_DAY:
        raise CannotImport(f"--chunk {text}: give whole hours, at most a week, for example 6h")
    return length


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or any(ord(char) < 32 for char in text):
        raise CannotImport("--source-header: write NAME: VALUE on one line")
    return name.strip(), value.strip()


HISTORY: Final = HistoryPlugin(
    name="prometheus",
    title="Prometheus",
    records="dcgm-exporter and kube-state-metrics",
    imports=imports,
    limits=(
        "kube-state-metrics shows the holder of a GPU to within the scrape interval; pods between scrapes are missed",
        "busy time is dcgm-exporter's utilisation; for pods that share a GPU it is not known which pod was busy",
        "time in which nothing was scraped is unmetered",
    ),
    reaches="queries the server at URL; reads source_token_file and source_ca_file",
    page="docs/import-prometheus.md",
)
