"""Who holds the chosen GPUs: pods on them, how they share them, MIG instances, and the chosen pods' own figures."""

from __future__ import annotations

from dashboards import palette, promql
from dashboards.board import Query, fixed, table, timeseries
from dashboards.looks import GPUS
from dashboards.panels import Table, TimeSeries

CHOSEN = promql.of_device(promql.grouped(promql.series("gpu_info", gpu_uuid="=~$gpu"), "cluster", "gpu_uuid"))
BY = ("node", "gpu_uuid", "mig_uuid", "namespace", "pod", "container", "sharing")
POD = {"gpu_uuid": "=~$gpu", "namespace": "=~$namespace", "pod": "=~$pod"}


def _held(what: str) -> str:
    return promql.of_device(promql.metered(promql.rate(f"pod_gpu_{what}_seconds_total", **POD)))


def holders() -> Table:
    """A row per holder."""
    columns = {
        "Share": promql.total(promql.of_device(promql.series("pod_gpu_share_ratio", **POD)), *BY),
        "Busy": promql.total(_held("busy"), *BY),
        "Memory": promql.total(promql.of_device(promql.series("pod_gpu_memory_used_bytes", **POD)), *BY),
    }
    share = {"unit": "percentunit", "decimals": 0}
    return table(
        "Holders",
        "Each container that holds a part of a chosen GPU: the part it was given, how much of the GPU's time it is "
        "busy, and the memory it uses. Where use cannot be told apart there is no figure, and not 0. Live.",
        [(heading, Query(expression, instant=True)) for heading, expression in columns.items()],
        by=BY,
        columns={"Share": share, "Busy": share, "Memory": {"unit": "bytes"}},
        unit="short",
        descending="Share",
    )


def busy() -> list[TimeSeries]:
    """The devices' busy time, by holder and by how it was come by."""
    return [
        timeseries(
            "Busy, by holder",
            "GPU time in use by each pod, and what belongs to no known holder; together they are the devices' own busy "
            "time. The ten largest pods. Live.",
            [
                Query(promql.top(10, promql.total(_held("busy"), "namespace", "pod")), "{{namespace}} / {{pod}}"),
                Query(promql.total(_unattributed()), "nobody known"),
            ],
            GPUS,
            stacked=True,
            looks={"^nobody known$": fixed(palette.GREY)},
        ),
        timeseries(
            "How busy time was come by",
            "Busy GPU time by the method of attribution: exact where the device is one pod's, by processes where it is "
            "shared. Live.",
            [Query(promql.total(_held("busy"), "method"), "{{method}}")],
            GPUS,
            stacked=True,
        ),
    ]


def sharing() -> list[TimeSeries | Table]:
    """How GPUs are divided, and the MIG instances."""
    mig = promql.of_device(
        promql.largest(promql.series("gpu_mig_info", gpu_uuid="=~$gpu"), "cluster", "gpu_uuid", "mig_uuid", "profile")
    )
    return [
        timeseries(
            "Held, by kind of sharing",
            "GPUs given out whole, as MIG instances, in time slices, through MPS or as fractions. Live.",
            [Query(promql.total(promql.named(_held("allocated"), "sharing", "whole"), "sharing"), "{{sharing}}")],
            GPUS,
            stacked=True,
        ),
        table(
            "MIG instances",
            "Instances of the chosen GPUs by profile. Live.",
            [("Instances", Query(promql.total(mig, "node", "gpu_uuid", "profile"), instant=True))],
            by=("node", "gpu_uuid", "profile"),
            columns={},
            unit="short",
            descending="Instances",
        ),
    ]


def pods() -> list[TimeSeries]:
    """The chosen pods: what they hold, use and draw."""

    def each(expression: str) -> str:
        return promql.top(10, promql.total(expression, "namespace", "pod"))

    energy = promql.of_device(promql.metered(promql.rate("pod_gpu_energy_joules_total", **POD)))
    memory = promql.of_device(promql.series("pod_gpu_memory_used_bytes", **POD))
    return [
        timeseries(
            "Held and busy",
            "GPUs that the chosen pods hold together, and how many of them execute work. Live.",
            [Query(promql.total(_held("allocated")), "allocated"), Query(promql.total(_held("busy")), "busy")],
            GPUS,
            looks={"^allocated$": fixed(palette.ORANGE), "^busy$": fixed(palette.GREEN)},
        ),
        timeseries(
            "Memory in use, by pod",
            "Device memory that each chosen pod uses: the ten largest. Live.",
            [Query(each(memory), "{{namespace}} / {{pod}}")],
            "bytes",
            names=palette.LAST,
        ),
        timeseries(
            "Power, by pod",
            "Power put on each chosen pod: active power by its busy time, idle power by what it holds. The ten "
            "largest. Live.",
            [Query(each(energy), "{{namespace}} / {{pod}}")],
            "watt",
            names=palette.LAST,
        ),
    ]


def _unattributed() -> str:
    return promql.of_device(promql.metered(promql.rate("gpu_unattributed_busy_seconds_total", gpu_uuid="=~$gpu")))
