"""Builds the dashboard "Cluster": capacity, use, cost, waiting workloads, power and data quality.

Every description names its source. *Live* figures come from the agents and follow the GPUs within an interval (a
minute). *Booked* figures come from the accountant's ledger, which is the source of bills and weights. They lag by the
minutes that rows take to arrive. Figures of waiting workloads come from the controller."""

from __future__ import annotations

from dashboards import grafana_schema, panels_and_variables, promql
from dashboards.grafana_schema import BarGauge, Stat, TablePanel, TimeSeries
from dashboards.panels_and_variables import (
    GPU_HOURS,
    GPUS,
    Levels,
    PanelSection,
    Query,
    bars,
    dashboard,
    fixed_colour,
    link_to,
    stat,
    table,
    timeseries,
)

DEVICES = promql.devices()
ALLOCATED = promql.of_device(promql.metered(promql.rate("gpu_allocated_seconds_total")))
HELD = promql.of_device(promql.metered(promql.rate("pod_gpu_allocated_seconds_total")))
"""Held GPUs by pod. The counter of a pod starts with the pod and lacks its first interval, so sums over devices use
ALLOCATED."""
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
"""GPUs that pods hold and do not use. Holders whose utilisation is unknown are not counted."""
GPU_UID = "gputally-gpu"


def by_model_and_pool() -> list[TimeSeries | BarGauge]:
    """Return panels with the utilisation and memory of each model, and the allocation of each pool."""
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
            looks=panels_and_variables.MODELS,
        ),
        timeseries(
            "Memory in use by GPU model",
            "Share of the device memory of a model's GPUs that is in use. High memory with low utilisation is a "
            "loaded but idle service. Live.",
            [Query(memory, "{{gpu_model}}")],
            "percentunit",
            share=True,
            looks=panels_and_variables.MODELS,
        ),
        bars(
            "Allocated by pool",
            "Share of each pool's GPUs that pods hold. Pools are those of the accountant's inventory. Live.",
            Query(by_pool, "{{pool}}"),
            "percentunit",
            decimals=0,
        ),
    ]


def namespaces() -> list[TablePanel | BarGauge]:
    """Return panels with the GPUs that namespaces hold and use, now and at peak hours."""
    held = promql.total(HELD, "namespace")
    busy = promql.total(promql.of_device(promql.metered(promql.rate("pod_gpu_busy_seconds_total"))), "namespace")
    figures = {
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
            "hours are from the hour “Peak from” up to “Peak to”, UTC. A name links to its GPUs and pods. Live.",
            figures,
            by=("namespace",),
            columns={"Namespace": link_to(GPU_UID, "GPUs and pods of this namespace", "namespace")},
            unit=GPUS,
            descending="Held",
            decimals=1,
        ),
        bars(
            "Held at peak hours, by namespace",
            "Mean number of GPUs held at peak hours over the shown time: the ten largest. A namespace that is listed "
            "here and not among the largest users could move work into the night. Live.",
            Query(promql.top(10, promql.at_peak(held)), "{{namespace}}"),
            GPUS,
            decimals=1,
        ),
    ]


def power() -> list[TimeSeries | BarGauge]:
    """Return panels with watts, joules per busy second, and kilowatt-hours."""
    watts = promql.total(promql.of_device(promql.series("gpu_power_watts")), "gpu_model")
    drawn = promql.of_device(promql.increase("gpu_energy_joules_total"))
    useful = promql.ratio(
        promql.total(promql.of_device(promql.metered(promql.rate("gpu_energy_joules_total"))), "gpu_model"),
        f"({promql.total(BUSY, 'gpu_model')} > 0)",
    )
    return [
        timeseries(
            "Power by GPU model",
            "Electric power that the GPUs draw, by model. Live.",
            [Query(watts, "{{gpu_model}}")],
            "watt",
            stacked=True,
            looks=panels_and_variables.MODELS,
        ),
        timeseries(
            "Energy per busy GPU-second",
            "Joules drawn for each second in which a GPU executes work. It rises when GPUs idle, because idle "
            "GPUs draw power too. Live.",
            [Query(useful, "{{gpu_model}}")],
            "joule",
            looks=panels_and_variables.MODELS,
        ),
        bars(
            "Energy by node, in the shown time",
            "Energy that the GPUs of a node have drawn in the time range of the dashboard: the ten largest. Live.",
            Query(promql.top(10, promql.total(drawn, "node") + " / 3.6e6"), "{{node}}"),
            "kwatth",
            decimals=1,
        ),
    ]


UID = "gputally-cluster"
TEAM_UID = "gputally-team"
TEAM_COLUMNS = {"Busy": "busy", "Held idle": "allocated_idle", "Unknown": "allocated_unknown"}
FREE = promql.of_device(promql.metered(promql.rate("gpu_unallocated_seconds_total")))
WAITING = promql.total(promql.of_clusters(promql.series("queue_waiting_gpus"), "queue"))
STRANDED = promql.total(promql.of_clusters(promql.series("fairshare_stranded_gpus")))
PEAK_FROM, PEAK_TO = 8, 18


def render() -> str:
    """Return the dashboard as JSON text."""
    return dashboard(
        uid=UID,
        title="gputally / Cluster",
        description=(
            "Capacity, use, cost, demand and power of the whole cluster, and how far the figures can be trusted."
        ),
        variables=[
            *panels_and_variables.scope(),
            *panels_and_variables.devices(),
            panels_and_variables.hour("peak_from", "Peak from (UTC)", PEAK_FROM),
            panels_and_variables.hour("peak_to", "Peak to (UTC)", PEAK_TO),
        ],
        sections=[
            PanelSection("Now", 4, _now()),
            PanelSection("", 4, _money_and_demand()),
            PanelSection("Where the GPUs go", 10, _where()),
            PanelSection("By model and pool", 9, by_model_and_pool()),
            PanelSection("Namespaces", 10, namespaces(), (14, 10)),
            PanelSection("This month", 10, _month()),
            PanelSection("Idle and waiting", 9, _idle_and_waiting()),
            PanelSection("Power and energy", 9, power()),
        ],
    )


def _now() -> list[Stat]:
    allocated = promql.ratio(promql.total(ALLOCATED), promql.total(DEVICES))
    busy = promql.ratio(promql.total(BUSY), promql.total(DEVICES))
    return [
        stat(
            "GPUs",
            "Physical GPUs that the ledger counts as capacity in the chosen pools and models. Booked.",
            Query(promql.total(promql.series("capacity_gpus", pool="=~$pool", gpu_model="=~$gpu_model"))),
            GPUS,
            decimals=0,
        ),
        stat(
            "Allocated",
            "Share of the chosen GPUs that pods hold, used or not. Live.",
            Query(allocated),
            "percentunit",
            decimals=1,
        ),
        stat(
            "Busy",
            "Share of the time in which the chosen GPUs execute work, for any holder or none. Live.",
            Query(busy),
            "percentunit",
            Levels.good_above(0.6, warning=0.3),
            decimals=1,
        ),
        stat(
            "GPUs lost",
            "GPUs that their driver reports as lost. Their time is booked as down and not billed. Live.",
            Query(promql.total(promql.of_device(promql.series("gpu_lost")))),
            GPUS,
            Levels.bad_above(1),
            decimals=0,
        ),
        stat(
            "Coverage",
            "Metered share of the capacity. Below 98 % the controller changes no queue weight, because too much usage "
            "is unknown. Booked.",
            Query(promql.smallest(promql.series("ledger_coverage_ratio"))),
            "percentunit",
            Levels.good_above(0.98, warning=0.95),
            decimals=2,
        ),
        stat(
            "Imbalance",
            "Difference between the accounts of all GPUs and their capacity. Any value but 0 is a defect of the "
            "ledger. Booked.",
            Query(promql.max_by(f"abs({promql.series('ledger_imbalance_seconds')})")),
            "s",
            Levels.bad_above(0.000001),
            decimals=6,
        ),
    ]


def _money_and_demand() -> list[Stat]:
    rate = promql.series("burn_rate_per_hour")
    idle = promql.total(promql.series("burn_rate_per_hour", team="__idle__"), "currency")
    return [
        stat(
            "Burn rate",
            "Cost of the cluster per hour, held or not, at the rate of the last quarter of an hour, in the price "
            "book's currency. GPUs without a price do not count. Booked.",
            Query(promql.total(rate, "currency"), "{{currency}}"),
            "suffix:/h",
            decimals=2,
        ),
        stat(
            "Paid for and unused",
            "Share of the burn rate for GPUs that no pod holds. Booked.",
            Query(promql.ratio(idle, promql.total(rate, "currency")), "{{currency}}"),
            "percentunit",
            Levels.bad_above(0.4, warning=0.2),
            decimals=1,
        ),
        stat(
            "GPUs without a price",
            "GPUs without a row in the price book. Their time is unpriced, not free. Booked.",
            Query(promql.total(promql.series("unpriced_gpus", pool="=~$pool", gpu_model="=~$gpu_model"))),
            GPUS,
            Levels.bad_above(0.01),
            decimals=0,
        ),
        stat(
            "Waiting",
            "GPUs that workloads in the queue need to start. From the controller.",
            Query(WAITING),
            GPUS,
            Levels.warning_above(1),
            decimals=0,
        ),
        stat(
            "Longest wait",
            "Time that the oldest waiting workload has waited. From the controller.",
            Query(promql.max_by(promql.series("queue_oldest_wait_seconds"))),
            "s",
            Levels.bad_above(86_400, warning=3600),
            decimals=0,
        ),
        stat(
            "Stranded",
            "Free GPUs on which no waiting gang fits, because too few are on one node. From the controller.",
            Query(STRANDED),
            GPUS,
            Levels.warning_above(1),
            decimals=0,
        ),
    ]


def _where() -> list[TimeSeries]:
    by_account = promql.series("account_gpus", gpu_model="=~$gpu_model")
    return [
        timeseries(
            "GPUs by account",
            "All GPUs of the cluster by account, averaged over the last settled quarter of an hour. Each moment of "
            "each "
            "GPU is in exactly one account, so the areas add up to the capacity. Records that arrive later still count "
            "as unmetered here. Booked.",
            [Query(promql.total(by_account, "account"), "{{account}}")],
            GPUS,
            stacked=True,
            looks=panels_and_variables.ACCOUNTS,
        ),
        timeseries(
            "Capacity, allocated, busy",
            "Chosen GPUs that exist, that pods hold, and that execute work. The difference between allocated and busy "
            "is held and idle. Busy above allocated is work without a reservation. Live.",
            [
                Query(promql.total(DEVICES), "capacity"),
                Query(promql.total(ALLOCATED), "allocated"),
                Query(promql.total(BUSY), "busy"),
            ],
            GPUS,
            looks=panels_and_variables.CAPACITY,
        ),
    ]


def _month() -> list[BarGauge | TablePanel]:
    spent = promql.total(promql.series("month_team_cost"), "team", "currency")
    return [
        bars(
            "GPU-hours by account, this month",
            "GPU-hours since the beginning of the month, by account. Late rows change them until the month is closed. "
            "Booked.",
            Query(promql.hours(promql.total(promql.series("month_account_gpu_seconds"), "account")), "{{account}}"),
            GPU_HOURS,
            decimals=0,
            looks=panels_and_variables.ACCOUNTS,
        ),
        bars(
            "Cost by team, this month",
            "Cost of each team's GPU time since the beginning of the month, at the prices of the price book. A team "
            "with unpriced time is left out, because its cost is unknown. Booked.",
            Query(spent, "{{team}} {{currency}}"),
            "short",
            decimals=2,
            looks=panels_and_variables.MONEY,
        ),
        table(
            "Teams, this month",
            "GPU-hours that each team used, held idle, and held with unknown use since the beginning of the month. A "
            "team's name links to its own dashboard. Booked.",
            {heading: _team_hours(account) for heading, account in TEAM_COLUMNS.items()},
            by=("team",),
            columns={
                heading: fixed_colour(grafana_schema.ACCOUNTS[account]) for heading, account in TEAM_COLUMNS.items()
            }
            | {"Team": link_to(TEAM_UID, "This team", "team")},
            unit=GPU_HOURS,
            descending="Busy",
            decimals=1,
        ),
    ]


def _team_hours(account: str) -> str:
    return promql.hours(promql.total(promql.series("month_team_gpu_seconds", account=account), "team"))


def _idle_and_waiting() -> list[TimeSeries | BarGauge]:
    return [
        timeseries(
            "Free, waiting, stranded",
            "Free GPUs, GPUs that waiting workloads need, and free GPUs on which no waiting gang fits. If free exceeds "
            "waiting and many are stranded, the free GPUs are fragmented. Live, and from the controller.",
            [
                Query(promql.total(FREE), "free"),
                Query(WAITING, "waiting"),
                Query(STRANDED, "stranded"),
            ],
            GPUS,
            looks={
                "^free$": fixed_colour(grafana_schema.SKY),
                "^waiting$": fixed_colour(grafana_schema.PURPLE),
                "^stranded$": fixed_colour(grafana_schema.VERMILION),
            },
        ),
        timeseries(
            "Burn rate by team",
            "Cost per hour by the team that holds the GPUs; __idle__ is capacity that no pod holds. Booked.",
            [Query(promql.total(promql.series("burn_rate_per_hour"), "team", "currency"), "{{team}} {{currency}}")],
            "suffix:/h",
            stacked=True,
            looks={"^__idle__": fixed_colour(grafana_schema.GREY)},
        ),
        bars(
            "Held but idle, by namespace",
            "GPUs that a namespace's pods hold and do not use: the ten largest. A pod whose use cannot be read is left "
            "out, not counted as idle. Live.",
            Query(promql.top(10, promql.total(IDLE, "namespace")), "{{namespace}}"),
            GPUS,
            decimals=1,
        ),
    ]
