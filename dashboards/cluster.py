"""The dashboard "gputally / Cluster": where the GPUs go, what that costs, who waits, and whether to believe it.

Two sources, named in every description: *live* figures come from the agents and follow the GPUs
within an interval (a minute); *booked* figures come from the accountant's ledger and are what bills
and weights are made of. They trail by the minutes that rows may take to arrive.
"""

from __future__ import annotations

from dashboards import choices, cluster_use, looks, palette, promql
from dashboards.board import Query, Section, Step, bars, dashboard, fixed, link_to, stat, table, timeseries
from dashboards.cluster_use import ALLOCATED, BUSY, DEVICES
from dashboards.looks import GPU_HOURS, GPUS
from dashboards.panels import BarGauge, Stat, Table, TimeSeries

UID = "gputally-cluster"
TEAM_UID = "gputally-team"
TEAM_COLUMNS = {"Busy": "busy", "Held idle": "allocated_idle", "Unknown": "allocated_unknown"}
FREE = promql.of_device(promql.metered(promql.rate("gpu_unallocated_seconds_total")))
WAITING = promql.total(promql.of_clusters(promql.series("queue_waiting_gpus"), "queue"))
STRANDED = promql.total(promql.of_clusters(promql.series("fairshare_stranded_gpus")))
PEAK_FROM, PEAK_TO = 8, 18


def render() -> str:
    """The dashboard as the JSON text that is committed."""
    return dashboard(
        uid=UID,
        title="gputally / Cluster",
        description=(
            "Capacity, use, cost, demand and power of the whole cluster, and how far the figures can be trusted."
        ),
        variables=[
            *choices.scope(),
            *choices.devices(),
            choices.hour("peak_from", "Peak from (UTC)", PEAK_FROM),
            choices.hour("peak_to", "Peak to (UTC)", PEAK_TO),
        ],
        sections=[
            Section("Now", 4, _now()),
            Section("", 4, _money_and_demand()),
            Section("Where the GPUs go", 10, _where()),
            Section("By model and pool", 9, cluster_use.by_model_and_pool()),
            Section("Namespaces", 10, cluster_use.namespaces(), (14, 10)),
            Section("This month", 10, _month()),
            Section("Idle and waiting", 9, _idle_and_waiting()),
            Section("Power and energy", 9, cluster_use.power()),
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
            [],
            palette.BLUE,
            decimals=0,
        ),
        stat(
            "Allocated",
            "Share of the chosen GPUs that some pod holds, used or not. Live.",
            Query(allocated),
            "percentunit",
            [],
            palette.BLUE,
            decimals=1,
        ),
        stat(
            "Busy",
            "Share of the time in which the chosen GPUs execute work, whoever holds them. Live.",
            Query(busy),
            "percentunit",
            [Step(0.3, palette.WARNING), Step(0.6, palette.GOOD)],
            palette.BAD,
            decimals=1,
        ),
        stat(
            "GPUs lost",
            "GPUs that their driver reports as lost. Their time is booked as down: nobody is billed for it. Live.",
            Query(promql.total(promql.of_device(promql.series("gpu_lost")))),
            GPUS,
            [Step(1, palette.BAD)],
            palette.GOOD,
            decimals=0,
        ),
        stat(
            "Coverage",
            "Metered share of the capacity. Below 98 % no queue weight is changed, because usage is not known "
            "well enough. Booked.",
            Query(promql.smallest(promql.series("ledger_coverage_ratio"))),
            "percentunit",
            [Step(0.95, palette.WARNING), Step(0.98, palette.GOOD)],
            palette.BAD,
            decimals=2,
        ),
        stat(
            "Imbalance",
            "How far the accounts of all GPUs are from adding up to their capacity. Anything but 0 is a fault of "
            "the ledger. Booked.",
            Query(promql.largest(f"abs({promql.series('ledger_imbalance_seconds')})")),
            "s",
            [Step(0.000001, palette.BAD)],
            palette.GOOD,
            decimals=6,
        ),
    ]


def _money_and_demand() -> list[Stat]:
    rate = promql.series("burn_rate_per_hour")
    idle = promql.total(promql.series("burn_rate_per_hour", team="__idle__"), "currency")
    return [
        stat(
            "Burn rate",
            "What an hour of the cluster costs at the rate of the last quarter of an hour, held or not, in the price "
            "book's currency. GPUs without a price are not in it. Booked.",
            Query(promql.total(rate, "currency"), "{{currency}}"),
            "suffix:/h",
            [],
            palette.BLUE,
            decimals=2,
        ),
        stat(
            "Paid for and unused",
            "Share of the burn rate that goes into GPUs that nobody holds. Booked.",
            Query(promql.ratio(idle, promql.total(rate, "currency")), "{{currency}}"),
            "percentunit",
            [Step(0.2, palette.WARNING), Step(0.4, palette.BAD)],
            palette.GOOD,
            decimals=1,
        ),
        stat(
            "GPUs without a price",
            "GPUs whose time no row of the price book prices: their time is unpriced, not free. Booked.",
            Query(promql.total(promql.series("unpriced_gpus", pool="=~$pool", gpu_model="=~$gpu_model"))),
            GPUS,
            [Step(0.01, palette.BAD)],
            palette.GOOD,
            decimals=0,
        ),
        stat(
            "Waiting",
            "GPUs that workloads in the queue need to start. From the controller.",
            Query(WAITING),
            GPUS,
            [Step(1, palette.WARNING)],
            palette.GOOD,
            decimals=0,
        ),
        stat(
            "Longest wait",
            "How long the first of all waiting workloads has waited. From the controller.",
            Query(promql.largest(promql.series("queue_oldest_wait_seconds"))),
            "s",
            [Step(3600, palette.WARNING), Step(86_400, palette.BAD)],
            palette.GOOD,
            decimals=0,
        ),
        stat(
            "Stranded",
            "GPUs that are free while no waiting gang fits on them: too few on one node for what is asked for. "
            "From the controller.",
            Query(STRANDED),
            GPUS,
            [Step(1, palette.WARNING)],
            palette.GOOD,
            decimals=0,
        ),
    ]


def _where() -> list[TimeSeries]:
    by_account = promql.series("account_gpus", gpu_model="=~$gpu_model")
    return [
        timeseries(
            "GPUs by account",
            "What became of every GPU of the cluster, in the mean of the last settled quarter of an hour: each moment "
            "of each GPU is in exactly one account, so the areas add up to the capacity. What arrived later than that "
            "still stands in unmetered here. Booked.",
            [Query(promql.total(by_account, "account"), "{{account}}")],
            GPUS,
            stacked=True,
            looks=looks.ACCOUNTS,
        ),
        timeseries(
            "Capacity, allocated, busy",
            "Chosen GPUs that exist, that a pod holds, and that execute work. Between allocated and busy lies "
            "what is held but idle; busy above allocated is work that nobody has reserved. Live.",
            [
                Query(promql.total(DEVICES), "capacity"),
                Query(promql.total(ALLOCATED), "allocated"),
                Query(promql.total(BUSY), "busy"),
            ],
            GPUS,
            looks=looks.CAPACITY,
        ),
    ]


def _month() -> list[BarGauge | Table]:
    spent = promql.total(promql.series("month_team_cost"), "team", "currency")
    return [
        bars(
            "GPU-hours by account, this month",
            "GPU-hours since the beginning of the month, by account. Booked; late rows still move them until the "
            "month is closed.",
            Query(promql.hours(promql.total(promql.series("month_account_gpu_seconds"), "account")), "{{account}}"),
            GPU_HOURS,
            decimals=0,
            looks=looks.ACCOUNTS,
        ),
        bars(
            "Cost by team, this month",
            "What each team's GPU time has cost since the beginning of the month, at the prices of the price "
            "book. A team with unpriced time is left out: its cost is not known. Booked.",
            Query(spent, "{{team}} {{currency}}"),
            "short",
            decimals=2,
            looks=looks.MONEY,
        ),
        table(
            "Teams, this month",
            "GPU-hours of each team since the beginning of the month: what it used, what it held idle, and what "
            "it held while use could not be read. A team's name leads to its own dashboard. Booked.",
            [(heading, Query(_team_hours(account), instant=True)) for heading, account in TEAM_COLUMNS.items()],
            by=("team",),
            columns={heading: fixed(palette.ACCOUNTS[account]) for heading, account in TEAM_COLUMNS.items()}
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
            "GPUs that nobody holds, GPUs that waiting workloads need, and what is free without being of use to any "
            "of them. Free above waiting with much stranded: the room is in pieces. Live, and from the controller.",
            [
                Query(promql.total(FREE), "free"),
                Query(WAITING, "waiting"),
                Query(STRANDED, "stranded"),
            ],
            GPUS,
            looks={
                "^free$": fixed(palette.SKY),
                "^waiting$": fixed(palette.PURPLE),
                "^stranded$": fixed(palette.VERMILION),
            },
        ),
        timeseries(
            "Burn rate by team",
            "What an hour costs, by who holds the GPUs; __idle__ is capacity that nobody holds. Booked.",
            [Query(promql.total(promql.series("burn_rate_per_hour"), "team", "currency"), "{{team}} {{currency}}")],
            "suffix:/h",
            stacked=True,
            looks={"^__idle__": fixed(palette.GREY)},
        ),
        bars(
            "Held but idle, by namespace",
            "GPUs that a namespace's pods hold while nothing runs on them: the ten largest. A pod whose use "
            "cannot be read is left out, not counted as idle. Live.",
            Query(promql.top(10, promql.total(cluster_use.IDLE, "namespace")), "{{namespace}}"),
            GPUS,
            decimals=1,
        ),
    ]
