"""The history of Prometheus passes the suite of histories."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import pytest

from accountant.histories.prometheus import command as prometheus
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND
from gputally.testing.histories import END_MS, START_MS, HistorySuite, Use
from gputally.testing.http_server import Handler, listening

Span = tuple[int, int]


class TestPrometheus(HistorySuite):
    plugin = prometheus.HISTORY
    tolerance_ms = 2 * MS_PER_MINUTE
    not_bookable = "512"
    records_use = True
    samples = True

    @pytest.fixture
    def written(self) -> Iterator[Callable[..., list[str]]]:
        uses: list[Use] = []
        silent: list[Span] = []

        class _Server(Handler):
            def do_POST(self) -> None:
                form = {name: texts[0] for name, texts in parse_qs(self.content().decode()).items()}
                answer = {"status": "success", "data": {"resultType": "vector", "result": _answer(form, uses, silent)}}
                self.say(200, json.dumps(answer).encode())

        with listening(_Server) as url:

            def write(given: Sequence[Use], silent_ms: Span | None = None) -> list[str]:
                uses[:] = given
                silent[:] = [silent_ms] if silent_ms is not None else []
                return [url, f"--start={START_MS}", f"--end={END_MS}", "--label=team"]

            yield write


_GPUS = 4
_WINDOW_MS = 2 * MS_PER_MINUTE


def _answer(form: Mapping[str, str], uses: Sequence[Use], silent: Sequence[Span]) -> list[dict[str, Any]]:
    """The result of a query of the importer, as from a scrape every minute of nodes with four GPUs."""
    query = form["query"]
    measured = any(one.busy_percent is not None for one in uses)
    metrics = [
        "kube_pod_container_resource_requests",
        "kube_node_info",
        *(["DCGM_FI_DEV_GPU_UTIL"] if measured else []),
    ]
    (name, *_) = re.findall(r"\b(?:kube_|DCGM_)\w+", query)
    if "count by (__name__)" in query:
        return [_value({"__name__": metric}, "1") for metric in metrics]
    if "count_over_time" in query:
        return [_value({}, "10")]
    if query.startswith("max("):
        return [_value({}, str(len({one.node for one in uses}) * _GPUS))]
    if query.startswith("sum by"):
        return [_value({"resource": "nvidia_com_gpu"}, "1")]
    found = [(labels, value, span) for labels, value, span in _series(name, uses, measured)]
    if "step" not in form:
        return [_value(labels, value) for labels, value, _ in found]
    start, end, step = (round(float(form[key]) * MS_PER_SECOND) for key in ("start", "end", "step"))
    times = range(start, end + 1, step)
    return [
        {"metric": labels, "values": [[at // MS_PER_SECOND, value] for at in times if _seen(at, span, silent)]}
        for labels, value, span in found
    ]


def _value(labels: Mapping[str, str], value: str) -> dict[str, Any]:
    return {"metric": labels, "value": [END_MS // MS_PER_SECOND, value]}


def _seen(at_ms: int, span: Span, silent: Sequence[Span]) -> bool:
    """Whether a sample of this span lies in the window that ends at an instant."""
    last = at_ms // MS_PER_MINUTE * MS_PER_MINUTE
    return any(
        at_ms - _WINDOW_MS < sample <= at_ms
        and span[0] <= sample < span[1]
        and not any(start <= sample < end for start, end in silent)
        for sample in (last, last - MS_PER_MINUTE)
    )


def _series(name: str, uses: Sequence[Use], measured: bool) -> Iterator[tuple[dict[str, str], str, tuple[int, int]]]:
    """The series of a metric: labels, value, and when it is there."""
    always = (0, END_MS + MS_PER_MINUTE)
    nodes = sorted({one.node for one in uses})
    of_nodes = {"kube_node_info": "1", "kube_node_status_allocatable": str(_GPUS)}
    for node in nodes if name in of_nodes else ():
        yield {"node": node, "resource": "nvidia_com_gpu"}, of_nodes[name], always
    for one in uses if name.startswith("kube_pod") else ():
        pod = {"namespace": one.account, "pod": f"pod-{one.number}", "uid": f"uid-{one.number}"}
        span = one.start_ms, one.end_ms
        if name == "kube_pod_container_resource_requests":
            wanted = {**pod, "container": "main", "node": one.node, "resource": "nvidia_com_gpu"}
            yield wanted, one.gpus, span
        elif name == "kube_pod_start_time":
            yield pod, str(one.start_ms / MS_PER_SECOND), span
        elif name == "kube_pod_completion_time":
            yield pod, str(one.end_ms / MS_PER_SECOND), span
        elif name == "kube_pod_labels":
            yield {**pod, "label_team": one.text, "label_app": one.text}, "1", span
        elif name == "kube_pod_owner":
            yield {**pod, "owner_kind": "Job", "owner_name": one.text}, "1", span
    if name == "DCGM_FI_DEV_GPU_UTIL" and measured:
        for node in nodes:
            for number in range(_GPUS):
                yield (
                    {"UUID": f"GPU-{node}-{number}", "gpu": str(number), "Hostname": node, "modelName": "H100"},
                    "50",
                    always,
                )
