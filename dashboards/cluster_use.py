"""How the chosen GPUs of a cluster are used: by model and pool, by namespace (at peak hours too), and their power."""

from __future__ import annotations

from dashboards import looks, promql
from dashboards.board import Query, bars, link_to, table, timeseries
from dashboards.looks import GPUS
from dashboards.panels import BarGauge, Table, TimeSeries

DEVICES = promql.devices()
ALLOCATED = promql.of_device(promql.metered(promql.rate("gpu_allocated_seconds_total")))
HELD = promql.of_device(promql.metered(promql.rate("pod_gpu_allocated_seconds_total")))
"""By pod. A counter that begins with its pod lacks the pod's first interval, so sums over devices use ALLOCATED."""
BUSY = promql.of_device(promql.metered(promql.rate("gpu_busy_seconds_total")))
HELD_BY = ("cluster", "gpu_uuid", "mig_uuid", "namespace", "pod", "container")
IDLE_ANYWHERE = promql.metered(
    "clamp_min("
    + promql.total(promql.rate("pod_gpu_allocated_seconds_total"), *HELD_BY)
    + " - "
    + promql.total(promql.rate("pod_gpu_busy_seconds_total"), *HELD_BY)
    + ", 0)"
)
IDLE = promql.of_device(IDLE_ANYWHERE)
"""GPUs held while nothing runs on them; a holder whose use is not known is none."""
GPU_UID = "gputally-gpu"


def by_model_and_pool() -> list[TimeSeries | BarGauge]:
    """Utilisation and memory of each model, and how full each pool is."""
    by_model = promql.ratio(promql.total(BUSY, "gpu_model"), promql.total(DEVICES, "gpu_model"))
    memory = promql.ratio(
        promql.total(promql.of_device(promql.series("gpu_memory_used_bytes")), "gpu_model"),
        promql.total(promql.of_device(promql.series("gpu_memory_total_bytes")), "gpu_model"),
    )
    by_pool = promql.ratio(
        promql.total(promql.with_pool(f"({ALLOCATED})"), "pool"), promql.total(promql.with_pool(DEVICES), "pool")
    )
    return [
        timeseries(
            "Utilisation by GPU model",
            "Share of the time in which GPUs of a model execute work. Live.",
            [Query(by_model, "{{gpu_model}}")],
            "percentunit",
            share=True,
            looks=looks.MODELS,
        ),
        timeseries(
            "Memory in use by GPU model",
            "Share of the device memory of a model's GPUs that is in use. High memory with low utilisation is a "
            "loaded but idle service. Live.",
            [Query(memory, "{{gpu_model}}")],
            "percentunit",
            share=True,
            looks=looks.MODELS,
        ),
        bars(
            "Allocated by pool",
            "Share of each pool's GPUs that some pod holds. Pools are those of the accountant's inventory. Live.",
            Query(by_pool, "{{pool}}"),
            "percentunit",
            decimals=0,
        ),
    ]


def namespaces() -> list[Table | BarGauge]:
    """Who holds what, and who holds it when everybody wants it."""
    held = promql.total(HELD, "namespace")
    busy = promql.total(promql.of_device(promql.metered(promql.rate("pod_gpu_busy_seconds_total"))), "namespace")
    columns = {
        "Held": held,
        "Busy": busy,
        "Held idle": promql.total(IDLE, "namespace"),
        "Held at peak": promql.at_peak(held),
        "Busy at peak": promql.at_peak(busy),
    }
    return [
        table(
            "GPUs by namespace",
            "GPUs that each namespace's pods hold and use now, and their mean at peak hours over the shown time. Peak "
            "hours are from the hour “Peak from” up to “Peak to”, UTC. A name leads to its GPUs and pods. Live.",
            [(heading, Query(expression, instant=True)) for heading, expression in columns.items()],
            by=("namespace",),
            columns={"Namespace": link_to(GPU_UID, "GPUs and pods of this namespace", "namespace")},
            unit=GPUS,
            descending="Held",
            decimals=1,
        ),
        bars(
            "Held at peak hours, by namespace",
            "Mean number of GPUs held at peak hours over the shown time: the ten largest. Who stands here and not "
            "among those who use much could move work into the night. Live.",
            Query(promql.top(10, promql.at_peak(held)), "{{namespace}}"),
            GPUS,
            decimals=1,
        ),
    ]


def power() -> list[TimeSeries | BarGauge]:
    """Watts, joules per busy second, and kilowatt-hours."""
    watts = promql.total(promql.of_device(promql.series("gpu_power_watts")), "gpu_model")
    drawn = promql.of_device(promql.increase("gpu_energy_joules_total"))
    useful = promql.ratio(
        promql.total(promql.of_device(promql.metered(promql.rate("gpu_energy_joules_total"))), "gpu_model"),
        f"({promql.total(BUSY, 'gpu_model')} > 0)",
    )
    return [
        timeseries(
            "Power by GPU model",
            "Electric power that the GPUs draw now, by model. Live.",
            [Query(watts, "{{gpu_model}}")],
            "watt",
            stacked=True,
            looks=looks.MODELS,
        ),
        timeseries(
            "Energy per busy GPU-second",
            "Joules drawn for each second in which a GPU executes work. It rises when GPUs idle, because idle "
            "GPUs draw power too. Live.",
            [Query(useful, "{{gpu_model}}")],
            "joule",
            looks=looks.MODELS,
        ),
        bars(
            "Energy by node, in the shown time",
            "Energy that the GPUs of a node have drawn in the time range of the dashboard: the ten largest. Live.",
            Query(promql.top(10, promql.total(drawn, "node") + " / 3.6e6"), "{{node}}"),
            "kwatth",
            decimals=1,
        ),
    ]
