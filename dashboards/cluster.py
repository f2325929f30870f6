"""The dashboard "gputally / Cluster": where the GPUs go, what that costs, and whether to believe it.

Two sources, named in every description: *live* figures come from the agents and follow the GPUs
within an interval (a minute); *booked* figures come from the accountant's ledger and are what bills
and weights are made of. They trail by the minutes that rows may take to arrive.
"""

from __future__ import annotations

from dashboards import palette, promql
from dashboards.board import Query, Step, bars, dashboard, datasource_variable, fixed, stat, table, timeseries, variable
from dashboards.panels import BarGauge, Json, Stat, Table, TimeSeries, Variable

UID = "gputally-cluster"
GPU_HOURS = "suffix: GPU-h"
GPUS = "suffix: GPUs"
CURRENCIES = ("USD", "EUR", "GBP", "CHF", "JPY")

PROGRAMS = '{__name__=~"gputally_.+_build_info"}'
ALLOCATED = promql.of_device(promql.rate("pod_gpu_allocated_seconds_total"))
BUSY = promql.of_device(promql.rate("gpu_busy_seconds_total"))
DEVICES = promql.devices()
TEAM_COLUMNS = {"Busy": "busy", "Held idle": "allocated_idle", "Unknown": "allocated_unknown"}
HELD_BY = ("gpu_uuid", "mig_uuid", "namespace", "pod", "container")

MODEL_LOOKS: dict[str, Json] = {name: fixed(color) for name, color in palette.MODELS.items()}
ACCOUNT_LOOKS: dict[str, Json] = {f"^{name}$": fixed(color) for name, color in palette.ACCOUNTS.items()}
MONEY_LOOKS: dict[str, Json] = {f"{code}$": {"unit": f"currency{code}"} for code in CURRENCIES}


def render() -> str:
    """The dashboard as the JSON text that is committed."""
    return dashboard(
        uid=UID,
        title="gputally / Cluster",
        description=(
            "Capacity, use, cost, fair share and power of the whole cluster, and how far the figures can be trusted."
        ),
        variables=_variables(),
        sections=[
            ("Now", 4, _now()),
            ("Where the GPUs go", 10, _where()),
            ("This month", 9, _month()),
            ("Utilisation", 9, _utilisation()),
            ("Fair share", 9, _fair_share()),
            ("Power and energy", 8, _power()),
            ("Can these figures be trusted?", 8, _trust()),
        ],
    )


def _variables() -> list[Variable]:
    return [
        datasource_variable(),
        variable("cluster", "Cluster", promql.values("cluster", PROGRAMS)),
        variable("job", "Job", promql.values("job", PROGRAMS.replace("}", ',cluster=~"$cluster"}'))),
        variable("gpu_model", "GPU model", promql.values("gpu_model", promql.series("gpu_info"))),
        variable("node", "Node", promql.values("node", promql.series("gpu_info", gpu_model="=~$gpu_model"))),
    ]


def _now() -> list[Stat]:
    allocated = promql.ratio(promql.total(ALLOCATED), promql.total(DEVICES))
    busy = promql.ratio(promql.total(BUSY), promql.total(DEVICES))
    return [
        stat(
            "GPUs",
            "Physical GPUs that the ledger counts as capacity, all models and pools. Booked.",
            Query(promql.total(promql.series("capacity_gpus"))),
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
            Query(promql.largest(f"abs({promql.series('ledger_imbalance_microseconds')})")),
            "µs",
            [Step(1, palette.BAD)],
            palette.GOOD,
            decimals=0,
        ),
    ]


def _where() -> list[TimeSeries]:
    return [
        timeseries(
            "GPUs by account",
            "What became of every GPU of the cluster: each moment of each GPU is in exactly one account, so the "
            "areas add up to the capacity. Booked.",
            [Query(promql.total(promql.rate("account_gpu_seconds_total"), "account"), "{{account}}")],
            GPUS,
            stacked=True,
            looks=ACCOUNT_LOOKS,
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
            looks={
                "^capacity$": fixed(palette.GREY),
                "^allocated$": fixed(palette.ORANGE),
                "^busy$": fixed(palette.GREEN),
            },
        ),
    ]


def _month() -> list[BarGauge | Table]:
    spent = promql.total(promql.series("team_cost_total"), "team", "currency")
    return [
        bars(
            "GPU-hours by account, this month",
            "GPU-hours since the beginning of the month, by account. Booked; late rows still move them until the "
            "month is closed.",
            Query(promql.hours(promql.total(promql.series("account_gpu_seconds_total"), "account")), "{{account}}"),
            GPU_HOURS,
            decimals=0,
            looks=ACCOUNT_LOOKS,
        ),
        bars(
            "Cost by team, this month",
            "What each team's GPU time has cost since the beginning of the month, at the prices of the price "
            "book. A team with unpriced time is left out: its cost is not known. Booked.",
            Query(spent, "{{team}} {{currency}}"),
            "short",
            decimals=2,
            looks=MONEY_LOOKS,
        ),
        table(
            "Teams, this month",
            "GPU-hours of each team since the beginning of the month: what it used, what it held idle, and what "
            "it held while use could not be read. Booked.",
            [(heading, Query(_team_hours(account), instant=True)) for heading, account in TEAM_COLUMNS.items()],
            by=("team",),
            columns={heading: fixed(palette.ACCOUNTS[account]) for heading, account in TEAM_COLUMNS.items()},
            unit=GPU_HOURS,
            descending="Busy",
        ),
    ]


def _team_hours(account: str) -> str:
    return promql.hours(promql.total(promql.series("team_gpu_seconds_total", account=account), "team"))


def _utilisation() -> list[TimeSeries | BarGauge]:
    by_model = promql.ratio(promql.total(BUSY, "gpu_model"), promql.total(DEVICES, "gpu_model"))
    held, used = (
        promql.total(promql.rate(f"pod_gpu_{what}_seconds_total"), *HELD_BY) for what in ("allocated", "busy")
    )
    idle = promql.total(promql.of_device(f"clamp_min({held} - {used}, 0)"), "namespace")
    memory = promql.ratio(
        promql.total(promql.of_device(promql.series("gpu_memory_used_bytes")), "gpu_model"),
        promql.total(promql.of_device(promql.series("gpu_memory_total_bytes")), "gpu_model"),
    )
    return [
        timeseries(
            "Utilisation by GPU model",
            "Share of the time in which GPUs of a model execute work. Live.",
            [Query(by_model, "{{gpu_model}}")],
            "percentunit",
            share=True,
            looks=MODEL_LOOKS,
        ),
        timeseries(
            "Memory in use by GPU model",
            "Share of the device memory of a model's GPUs that is in use. High memory with low utilisation is a "
            "loaded but idle service. Live.",
            [Query(memory, "{{gpu_model}}")],
            "percentunit",
            share=True,
            looks=MODEL_LOOKS,
        ),
        bars(
            "Held but idle, by namespace",
            "GPUs that a namespace's pods hold while nothing runs on them: the ten largest. A pod whose use "
            "cannot be read is left out, not counted as idle. Live.",
            Query(promql.top(10, idle), "{{namespace}}"),
            GPUS,
            decimals=1,
        ),
    ]


def _fair_share() -> list[Table | TimeSeries]:
    weight = promql.largest(promql.series("queue_weight"), "queue", "target")
    base = promql.largest(promql.series("queue_weight_base"), "queue")
    multiplier = f"{weight} / on (queue) group_left () {base}"
    by_queue = [
        ("Entitled GPUs", promql.largest(promql.series("queue_entitled_gpus"), "queue")),
        ("Use over entitlement", promql.largest(promql.series("queue_usage_ratio"), "queue")),
        ("Configured weight", base),
        ("Weight in force", promql.largest(promql.series("queue_weight"), "queue")),
    ]
    return [
        table(
            "Queues",
            "What the policy entitles each queue to, how much of it the queue has used over the policy's window, "
            "and the weight that follows from it.",
            [(heading, Query(expression, instant=True)) for heading, expression in by_queue],
            by=("queue",),
            columns={"Use over entitlement": {"unit": "percentunit", "decimals": 0}},
            unit="short",
            descending="Entitled GPUs",
        ),
        timeseries(
            "Weight in force over configured weight",
            "Above 1 a queue is given more than its configured weight because it has used less than its share; "
            "below 1 it gives back.",
            [Query(multiplier, "{{queue}} ({{target}})")],
            "suffix:×",
        ),
        timeseries(
            "Why weights stand still",
            "1 while the last good weights are held, by reason: the accountant does not answer, usage is too old or "
            "its coverage too low. 1 too while a target is degraded: its objects are missing, or a field is contested.",
            [
                Query(promql.total(promql.series("weights_held"), "reason"), "held: {{reason}}"),
                Query(
                    promql.total(promql.series("fairshare_target_degraded"), "target", "reason"),
                    "degraded: {{target}}, {{reason}}",
                ),
            ],
            "short",
            looks={"^degraded": fixed(palette.BAD)},
        ),
    ]


def _power() -> list[TimeSeries | BarGauge]:
    watts = promql.total(promql.of_device(promql.series("gpu_power_watts")), "gpu_model")
    drawn = promql.of_device(promql.increase("gpu_energy_joules_total"))
    useful = promql.ratio(
        promql.total(promql.of_device(promql.rate("gpu_energy_joules_total")), "gpu_model"),
        f"({promql.total(BUSY, 'gpu_model')} > 0)",
    )
    return [
        timeseries(
            "Power by GPU model",
            "Electric power that the GPUs draw now, by model. Live.",
            [Query(watts, "{{gpu_model}}")],
            "watt",
            stacked=True,
            looks=MODEL_LOOKS,
        ),
        timeseries(
            "Energy per busy GPU-second",
            "Joules drawn for each second in which a GPU executes work. It rises when GPUs idle, because idle "
            "GPUs draw power too. Live.",
            [Query(useful, "{{gpu_model}}")],
            "joule",
            looks=MODEL_LOOKS,
        ),
        bars(
            "Energy by node, in the shown time",
            "Energy that the GPUs of a node have drawn in the time range of the dashboard: the ten largest. Live.",
            Query(promql.top(10, promql.total(drawn, "node") + " / 3.6e6"), "{{node}}"),
            "kwatth",
            decimals=1,
        ),
    ]


def _trust() -> list[TimeSeries]:
    return [
        timeseries(
            "Coverage of the ledger",
            "Metered share of the capacity over time. The lines are at 95 % and 98 %; below 98 % weights are "
            "held. Booked.",
            [Query(promql.smallest(promql.series("ledger_coverage_ratio")), "coverage")],
            "percentunit",
            share=True,
            steps=[Step(0.95, palette.WARNING), Step(0.98, palette.GOOD)],
            base=palette.BAD,
            looks={"^coverage$": fixed(palette.BLUE)},
        ),
        timeseries(
            "Age of what has not arrived",
            "Oldest interval that an agent has not yet delivered, and how far the ledger's watermark and the "
            "usage that the controller works with lie behind. The line is at 15 minutes, after which weights are "
            "held.",
            [
                Query(promql.largest(promql.series("agent_outbox_oldest_age_seconds")), "oldest in an outbox"),
                Query(promql.age(promql.smallest(promql.series("ledger_watermark_timestamp_seconds"))), "watermark"),
                Query(promql.largest(promql.series("fairshare_usage_age_seconds")), "usage at the controller"),
            ],
            "s",
            steps=[Step(900, palette.BAD)],
            looks={
                "^oldest": fixed(palette.ORANGE),
                "^watermark$": fixed(palette.BLUE),
                "^usage": fixed(palette.PURPLE),
            },
        ),
        timeseries(
            "Rows refused",
            "Intervals per second that were not booked: parked on the node because the accountant cannot decode "
            "them, or quarantined because they contradict what is known. Their time is unmetered.",
            [
                Query(promql.total(promql.rate("agent_rows_parked_total"), "reason"), "parked: {{reason}}"),
                Query(promql.total(promql.rate("ingest_rows_total", result="quarantined")), "quarantined"),
            ],
            "suffix: rows/s",
            looks={"^quarantined$": fixed(palette.BAD)},
        ),
    ]
