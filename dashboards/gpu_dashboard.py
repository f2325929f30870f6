"""Builds the dashboard "GPU and pod": all details of one GPU or one pod.

The panels are for one node, GPU or pod. If more are selected, panels by GPU draw the twenty largest series, and panels
by pod the ten largest."""

from __future__ import annotations

from dashboards import grafana_schema, panels_and_variables, promql
from dashboards.grafana_schema import Stat, TablePanel, TimeSeries
from dashboards.panels_and_variables import (
    GPUS,
    SHARE,
    Levels,
    PanelSection,
    Query,
    Step,
    dashboard,
    fixed_colour,
    stat,
    table,
    timeseries,
)

CHOSEN = promql.of_device(promql.grouped(promql.series("gpu_info", gpu_uuid="=~$gpu"), "cluster", "gpu_uuid"))
BY = ("node", "gpu_uuid", "mig_uuid", "namespace", "pod", "container", "sharing")
POD = {"gpu_uuid": "=~$gpu", "namespace": "=~$namespace", "pod": "=~$pod"}


def _pod_rate(what: str) -> str:
    return promql.of_device(promql.metered(promql.rate(f"pod_gpu_{what}_seconds_total", **POD)))


def holders() -> TablePanel:
    """Return a table with one row per holder."""
    figures = {
        "Share": promql.total(promql.of_device(promql.series("pod_gpu_share_ratio", **POD)), *BY),
        "Busy": promql.total(_pod_rate("busy"), *BY),
        "Memory": promql.total(promql.of_device(promql.series("pod_gpu_memory_used_bytes", **POD)), *BY),
    }
    return table(
        "Holders",
        "Each container that holds a part of a chosen GPU: its part of the GPU, the share of the GPU's time that it is "
        "busy, and its memory. A cell is empty, not 0, if the driver cannot measure the use. Live.",
        figures,
        by=BY,
        columns={"Share": SHARE, "Busy": SHARE, "Memory": {"unit": "bytes"}},
        unit="short",
        descending="Share",
    )


def busy() -> list[TimeSeries]:
    """Return panels with the busy time of the GPUs, by holder and by method of attribution."""
    unattributed = promql.total(_rate_of("gpu_unattributed_busy_seconds_total"))
    return [
        timeseries(
            "Busy, by holder",
            "Busy GPU time of each pod, and busy time without a known holder; together they are the GPUs' own busy "
            "time. The ten largest pods. Live.",
            [
                Query(promql.top(10, promql.total(_pod_rate("busy"), "namespace", "pod")), "{{namespace}} / {{pod}}"),
                Query(unattributed, "unattributed"),
            ],
            GPUS,
            stacked=True,
            looks={"^unattributed$": fixed_colour(grafana_schema.GREY)},
        ),
        timeseries(
            "Busy, by method of attribution",
            "Busy GPU time by the method that attributes it: exactly if one pod holds the GPU, by processes if several "
            "share it. Live.",
            [Query(promql.total(_pod_rate("busy"), "method"), "{{method}}")],
            GPUS,
            stacked=True,
        ),
    ]


def sharing() -> list[TimeSeries | TablePanel]:
    """Return panels with the kinds of sharing and the MIG instances."""
    mig = promql.of_device(
        promql.max_by(promql.series("gpu_mig_info", gpu_uuid="=~$gpu"), "cluster", "gpu_uuid", "mig_uuid", "profile")
    )
    return [
        timeseries(
            "Held, by kind of sharing",
            "GPUs that are allocated whole, as MIG instances, in time slices, through MPS or as fractions. Live.",
            [Query(promql.total(promql.named(_pod_rate("allocated"), "sharing", "whole"), "sharing"), "{{sharing}}")],
            GPUS,
            stacked=True,
        ),
        table(
            "MIG instances",
            "Instances of the chosen GPUs by profile. Live.",
            {"Instances": promql.total(mig, "node", "gpu_uuid", "profile")},
            by=("node", "gpu_uuid", "profile"),
            columns={},
            unit="short",
            descending="Instances",
        ),
    ]


def pods() -> list[TimeSeries]:
    """Return panels with the GPUs, memory and power of the chosen pods."""

    def each(expression: str) -> str:
        return promql.top(10, promql.total(expression, "namespace", "pod"))

    energy = promql.of_device(promql.metered(promql.rate("pod_gpu_energy_joules_total", **POD)))
    memory = promql.of_device(promql.series("pod_gpu_memory_used_bytes", **POD))
    return [
        timeseries(
            "Held and busy",
            "GPUs that the chosen pods hold, and those of them that execute work. Live.",
            [Query(promql.total(_pod_rate("allocated")), "allocated"), Query(promql.total(_pod_rate("busy")), "busy")],
            GPUS,
            looks={"^allocated$": fixed_colour(grafana_schema.ORANGE), "^busy$": fixed_colour(grafana_schema.GREEN)},
        ),
        timeseries(
            "Memory in use, by pod",
            "Device memory that each chosen pod uses: the ten largest. Live.",
            [Query(each(memory), "{{namespace}} / {{pod}}")],
            "bytes",
            names=grafana_schema.LAST,
        ),
        timeseries(
            "Power, by pod",
            "Power attributed to each chosen pod: active power by its busy time, idle power by the GPUs that it holds. "
            "The ten largest. Live.",
            [Query(each(energy), "{{namespace}} / {{pod}}")],
            "watt",
            names=grafana_schema.LAST,
        ),
    ]


UID = "gputally-gpu"
MOST = 20
HEALTH_MOST = 50


def render() -> str:
    """Return the dashboard as JSON text."""
    return dashboard(
        uid=UID,
        title="gputally / GPU and pod",
        description="All details of one GPU or one pod: use, memory, power, clocks, faults, MIG and sharing.",
        variables=[
            *panels_and_variables.scope(),
            *panels_and_variables.devices(),
            panels_and_variables.gpu(),
            panels_and_variables.namespace(),
            panels_and_variables.pod(),
        ],
        sections=[
            PanelSection("Chosen GPUs", 4, _now()),
            PanelSection("Device", 9, _device()),
            PanelSection("", 9, _power()),
            PanelSection("Holders", 10, [holders()]),
            PanelSection("", 9, busy()),
            PanelSection("Sharing and MIG", 9, sharing(), (14, 10)),
            PanelSection("Chosen pods", 9, pods()),
            PanelSection("Faults", 9, _faults()),
        ],
    )


def _of(metric: str, **labels: str) -> str:
    return promql.of_device(promql.series(metric, gpu_uuid="=~$gpu", **labels))


def _rate_of(metric: str) -> str:
    return promql.of_device(promql.metered(promql.rate(metric, gpu_uuid="=~$gpu")))


def _each(expression: str) -> str:
    return promql.top(MOST, promql.total(expression, "gpu_uuid", "node"))


def _now() -> list[Stat]:
    busy, many = promql.total(_rate_of("gpu_busy_seconds_total")), promql.total(CHOSEN)
    memory = promql.ratio(promql.total(_of("gpu_memory_used_bytes")), promql.total(_of("gpu_memory_total_bytes")))
    recent = f"({promql.age(promql.series('gpu_xid_last_timestamp_seconds', gpu_uuid='=~$gpu'))} < 86400)"
    return [
        stat("GPUs", "Number of chosen physical GPUs. Live.", Query(many), GPUS, decimals=0),
        stat(
            "Busy",
            "Share of the time in which the chosen GPUs execute work, for any holder or none. Live.",
            Query(promql.ratio(busy, many)),
            "percentunit",
            Levels.good_above(0.6, warning=0.3),
            decimals=1,
        ),
        stat(
            "Memory in use",
            "Share of the device memory of the chosen GPUs that is in use. Live.",
            Query(memory),
            "percentunit",
            Levels(grafana_schema.BLUE, [Step(0.95, grafana_schema.WARNING)]),
            decimals=1,
        ),
        stat(
            "Power",
            "Electric power that the chosen GPUs draw together. Live.",
            Query(promql.total(_of("gpu_power_watts"))),
            "watt",
            decimals=0,
        ),
        stat(
            "Hottest",
            "Temperature of the hottest chosen GPU. Live.",
            Query(promql.max_by(_of("gpu_temperature_celsius"))),
            "celsius",
            Levels.bad_above(90, warning=80),
            decimals=0,
        ),
        stat(
            "GPUs with an XID",
            "Chosen GPUs for which the driver reported an XID error in the last day. Live.",
            Query(f"count({promql.of_device(promql.grouped(recent, 'cluster', 'gpu_uuid'))}) or {many} * 0"),
            GPUS,
            Levels.bad_above(1),
            decimals=0,
        ),
    ]


def _device() -> list[TimeSeries]:
    memory = promql.ratio(f"({_of('gpu_memory_used_bytes')})", f"({_of('gpu_memory_total_bytes')})")
    return [
        timeseries(
            "Busy, by GPU",
            f"Share of the time in which each GPU executes work: the {MOST} busiest. Live.",
            [Query(_each(_rate_of("gpu_busy_seconds_total")), "{{node}} {{gpu_uuid}}")],
            "percentunit",
            names=grafana_schema.LAST,
            share=True,
        ),
        timeseries(
            "Multiprocessors and tensor cores",
            "Mean share of the time in which the multiprocessors and the tensor cores of the chosen GPUs are active. "
            "If busy is far above them, the kernels use a small part of the GPU. Live.",
            [
                Query(f"avg({_rate_of('gpu_busy_seconds_total')})", "busy"),
                Query(f"avg({_rate_of('gpu_sm_active_seconds_total')})", "multiprocessors"),
                Query(f"avg({_rate_of('gpu_tensor_active_seconds_total')})", "tensor cores"),
            ],
            "percentunit",
            share=True,
            looks={
                "^busy$": fixed_colour(grafana_schema.GREEN),
                "^multiprocessors$": fixed_colour(grafana_schema.BLUE),
                "^tensor": fixed_colour(grafana_schema.ORANGE),
            },
        ),
        timeseries(
            "Memory in use, by GPU",
            f"Share of each GPU's memory that is in use: the {MOST} fullest. Live.",
            [Query(_each(memory), "{{node}} {{gpu_uuid}}")],
            "percentunit",
            names=grafana_schema.LAST,
            share=True,
        ),
    ]


def _power() -> list[TimeSeries]:
    throttled = promql.total(_of("gpu_throttle_reason"), "reason")
    return [
        timeseries(
            "Power, by GPU",
            f"Electric power that each GPU draws: the {MOST} largest. Live.",
            [Query(_each(_of("gpu_power_watts")), "{{node}} {{gpu_uuid}}")],
            "watt",
            names=grafana_schema.LAST,
        ),
        timeseries(
            "Temperature, by GPU",
            f"Temperature of each GPU: the {MOST} hottest. The lines are at 80 and 90 °C. Live.",
            [Query(_each(_of("gpu_temperature_celsius")), "{{node}} {{gpu_uuid}}")],
            "celsius",
            names=grafana_schema.LAST,
            levels=Levels.bad_above(90, warning=80),
        ),
        timeseries(
            "Throttled GPUs",
            "Number of chosen GPUs whose clocks the driver throttles, by reason. Live.",
            [Query(throttled, "{{reason}}")],
            GPUS,
        ),
    ]


def _faults() -> list[TablePanel | TimeSeries]:
    ecc = promql.rate("gpu_ecc_errors_total", gpu_uuid="=~$gpu")
    xids = promql.max_by(promql.age(f"({_of('gpu_xid_last_timestamp_seconds')})"), "gpu_uuid", "node", "xid")
    return [
        table(
            "XID errors",
            f"XID errors that the driver reported, by number, and the time since the last one: the {HEALTH_MOST} "
            "latest. NVIDIA's list of XID errors explains the numbers. Live.",
            {"Since the last": f"bottomk({HEALTH_MOST}, {xids})"},
            by=("node", "gpu_uuid", "xid"),
            columns={},
            unit="s",
            descending="XID",
        ),
        timeseries(
            "Memory errors",
            "Memory errors that ECC corrected or could not correct, per hour, by kind. Live.",
            [Query(f"{promql.total(promql.of_device(ecc), 'kind')} * 3600", "{{kind}}")],
            "suffix:/h",
        ),
        timeseries(
            "GPUs lost",
            "Chosen GPUs that the driver lists and cannot use. Their time is booked as down and not billed. Live.",
            [Query(promql.total(_of("gpu_lost"), "node"), "{{node}}")],
            GPUS,
        ),
    ]
