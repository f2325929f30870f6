"""The dashboard "gputally / GPU and pod": one device, or one pod, in full. Everything here is live.

A choice of many GPUs is drawn as the twenty largest: the panels are made for a node, a GPU, a pod.
"""

from __future__ import annotations

from dashboards import choices, gpu_holders, palette, promql
from dashboards.board import Query, Section, Step, dashboard, fixed, stat, table, timeseries
from dashboards.gpu_holders import CHOSEN
from dashboards.looks import GPUS
from dashboards.panels import Stat, Table, TimeSeries

UID = "gputally-gpu"
MOST = 20
HEALTH_MOST = 50


def render() -> str:
    """The dashboard as the JSON text that is committed."""
    return dashboard(
        uid=UID,
        title="gputally / GPU and pod",
        description="One device or one pod in full: use, memory, power, clocks, faults, MIG, and who shares it.",
        variables=[
            *choices.scope(),
            *choices.devices(),
            choices.gpu(),
            choices.namespace(),
            choices.pod(),
        ],
        sections=[
            Section("Chosen GPUs", 4, _now()),
            Section("Device", 9, _device()),
            Section("", 9, _power()),
            Section("Who holds it", 10, [gpu_holders.holders()]),
            Section("", 9, gpu_holders.busy()),
            Section("Sharing and MIG", 9, gpu_holders.sharing(), (14, 10)),
            Section("Chosen pods", 9, gpu_holders.pods()),
            Section("Faults", 9, _faults()),
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
        stat("GPUs", "How many physical GPUs are chosen. Live.", Query(many), GPUS, [], palette.BLUE, decimals=0),
        stat(
            "Busy",
            "Share of the time in which the chosen GPUs execute work, whoever holds them. Live.",
            Query(promql.ratio(busy, many)),
            "percentunit",
            [Step(0.3, palette.WARNING), Step(0.6, palette.GOOD)],
            palette.BAD,
            decimals=1,
        ),
        stat(
            "Memory in use",
            "Share of the device memory of the chosen GPUs that is in use. Live.",
            Query(memory),
            "percentunit",
            [Step(0.95, palette.WARNING)],
            palette.BLUE,
            decimals=1,
        ),
        stat(
            "Power",
            "Electric power that the chosen GPUs draw together. Live.",
            Query(promql.total(_of("gpu_power_watts"))),
            "watt",
            [],
            palette.BLUE,
            decimals=0,
        ),
        stat(
            "Hottest",
            "Temperature of the hottest chosen GPU. Live.",
            Query(promql.largest(_of("gpu_temperature_celsius"))),
            "celsius",
            [Step(80, palette.WARNING), Step(90, palette.BAD)],
            palette.GOOD,
            decimals=0,
        ),
        stat(
            "GPUs with an XID",
            "Chosen GPUs for which the driver reported an XID error in the last day. Live.",
            Query(f"count({promql.of_device(promql.grouped(recent, 'cluster', 'gpu_uuid'))}) or {many} * 0"),
            GPUS,
            [Step(1, palette.BAD)],
            palette.GOOD,
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
            names=palette.LAST,
            share=True,
        ),
        timeseries(
            "Multiprocessors and tensor cores",
            "Mean share of the time in which the multiprocessors, and the tensor cores, of the chosen GPUs are active. "
            "Busy far above them: kernels run that use a small part of the device. Live.",
            [
                Query(f"avg({_rate_of('gpu_busy_seconds_total')})", "busy"),
                Query(f"avg({_rate_of('gpu_sm_active_seconds_total')})", "multiprocessors"),
                Query(f"avg({_rate_of('gpu_tensor_active_seconds_total')})", "tensor cores"),
            ],
            "percentunit",
            share=True,
            looks={
                "^busy$": fixed(palette.GREEN),
                "^multiprocessors$": fixed(palette.BLUE),
                "^tensor": fixed(palette.ORANGE),
            },
        ),
        timeseries(
            "Memory in use, by GPU",
            f"Share of each GPU's memory that is in use: the {MOST} fullest. Live.",
            [Query(_each(memory), "{{node}} {{gpu_uuid}}")],
            "percentunit",
            names=palette.LAST,
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
            names=palette.LAST,
        ),
        timeseries(
            "Temperature, by GPU",
            f"Temperature of each GPU: the {MOST} hottest. The lines are at 80 and 90 °C. Live.",
            [Query(_each(_of("gpu_temperature_celsius")), "{{node}} {{gpu_uuid}}")],
            "celsius",
            names=palette.LAST,
            steps=[Step(80, palette.WARNING), Step(90, palette.BAD)],
        ),
        timeseries(
            "Clocks held down",
            "How many of the chosen GPUs have their clocks held down, by reason. Live.",
            [Query(throttled, "{{reason}}")],
            GPUS,
        ),
    ]


def _faults() -> list[Table | TimeSeries]:
    ecc = promql.rate("gpu_ecc_errors_total", gpu_uuid="=~$gpu")
    xids = promql.largest(promql.age(f"({_of('gpu_xid_last_timestamp_seconds')})"), "gpu_uuid", "node", "xid")
    return [
        table(
            "XID errors",
            f"XID errors that the driver reported, by number, and how long ago the last was: the {HEALTH_MOST} latest. "
            "What a number means stands in NVIDIA's list of XID errors. Live.",
            [("Since the last", Query(f"bottomk({HEALTH_MOST}, {xids})", instant=True))],
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
            "Chosen GPUs that are listed but cannot be used. Their time is booked as down: nobody is billed. Live.",
            [Query(promql.total(_of("gpu_lost"), "node"), "{{node}}")],
            GPUS,
        ),
    ]
