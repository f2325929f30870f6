"""Builds the dashboard "Fairshare": what each queue is entitled to, holds and requests.

All figures come from the controller. While it keeps the last good weights (usage too old, or not enough of it metered),
shares and entitlements have no figure, because old ones would look current."""

from __future__ import annotations

from dashboards import grafana_panels, layout, promql
from dashboards.grafana_panels import BarGauge, Json, Stat, Table, TimeSeries
from dashboards.layout import (
    GPU_HOURS,
    GPUS,
    Levels,
    Query,
    Section,
    Step,
    bars,
    dashboard,
    fixed_colour,
    stat,
    table,
    timeseries,
)

UID = "gputally-fairshare"
SHARE: Json = {"unit": "percentunit", "decimals": 0}
DASHED: Json = {"custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}
STALE_S = 900
"""Older usage changes no weight, by the default policy."""


def render() -> str:
    """The committed JSON text of the dashboard."""
    return dashboard(
        uid=UID,
        title="gputally / Fairshare",
        description="Entitled against actual share, published weights, demand, preemptions, oscillation, staleness.",
        variables=[*layout.scope(), layout.target(), layout.queue_of_target()],
        sections=[
            Section("Now", 4, _now()),
            Section("Entitled and actual share, over the policy's window", 10, _shares(), (13, 11)),
            Section("Weights", 9, _weights()),
            Section("Demand", 9, _demand()),
            Section("Preemptions", 9, _preemptions()),
            Section("Oscillation and staleness", 9, _calm()),
        ],
    )


def _of(metric: str) -> str:
    """A queue's figure, for the chosen queues and schedulers. Two replicas export the same series; one counts."""
    return promql.max_by(promql.series(metric, queue="=~$queue", target="=~$target"), "queue", "target")


def _gpus(metric: str) -> str:
    """GPUs of the chosen queues, added up over clusters."""
    shown = promql.series(metric, queue="=~$queue", target="=~$target")
    return promql.total(promql.of_clusters(shown, "queue", "target"), "queue", "target")


def _waiting() -> str:
    shown = promql.series("queue_waiting_gpus", queue="=~$queue")
    return promql.total(promql.of_clusters(shown, "queue"), "queue")


def _by_queue(metric: str) -> str:
    return promql.max_by(promql.series(metric, queue="=~$queue"), "queue")


def _now() -> list[Stat]:
    held, degraded = promql.series("weights_held"), promql.series("fairshare_target_degraded", target="=~$target")
    leaders = promql.smallest(promql.total(promql.series("fairshare_leader"), "cluster"))
    return [
        stat(
            "Acting controllers",
            "Replicas that act: one, else no weight moves. Of several clusters the one with the fewest.",
            Query(leaders),
            "suffix: acting",
            Levels(grafana_panels.BAD, [Step(1, grafana_panels.GOOD), Step(2, grafana_panels.BAD)]),
            decimals=0,
        ),
        stat(
            "Holding",
            "Reasons for which the last good weights are held: 0 while weights follow usage.",
            Query(f"count({promql.grouped(held, 'cluster', 'reason')}) or {leaders} * 0"),
            "suffix: reasons",
            Levels.warning_above(1),
            decimals=0,
        ),
        stat(
            "Targets degraded",
            "Schedulers that the controller cannot serve: objects missing, fields contested, writes refused.",
            Query(f"count({promql.grouped(degraded, 'cluster', 'target')}) or {leaders} * 0"),
            "suffix: targets",
            Levels.bad_above(1),
            decimals=0,
        ),
        stat(
            "Age of usage",
            "How old the newest usage is that weights rest on. Past 15 minutes they are held.",
            Query(promql.max_by(promql.series("fairshare_usage_age_seconds"))),
            "s",
            Levels.bad_above(STALE_S, warning=600),
            decimals=0,
        ),
        stat(
            "Waiting",
            "GPUs that waiting workloads of the chosen queues need to start.",
            Query(promql.total(_waiting())),
            GPUS,
            Levels.warning_above(1),
            decimals=0,
        ),
        stat(
            "Stranded",
            "GPUs that are free while no waiting gang fits on them.",
            Query(promql.total(promql.of_clusters(promql.series("fairshare_stranded_gpus")))),
            GPUS,
            Levels.warning_above(1),
            decimals=0,
        ),
    ]


def _shares() -> list[Table | TimeSeries]:
    entitled, actual = _of("queue_configured_share_ratio"), _of("queue_usage_ratio")
    columns = {
        "Entitled share": entitled,
        "Actual share": actual,
        "Due now": _gpus("queue_entitled_gpus"),
        "Guaranteed": _gpus("queue_guaranteed_gpus"),
        "Held now": _gpus("queue_allocated_gpus"),
    }
    return [
        table(
            "Queues",
            "The share that a queue's configured weight stands for among its siblings who compete, and the share it "
            "had over the policy's window; the GPUs it is due now with that history, its deserved quota, its GPUs.",
            [(heading, Query(expression, instant=True)) for heading, expression in columns.items()],
            by=("queue", "target"),
            columns={"Entitled share": SHARE, "Actual share": SHARE},
            unit="short",
            descending="Actual share",
            decimals=1,
        ),
        timeseries(
            "Actual minus entitled share",
            "Above 0 a queue has had more than its part over the policy's window and will give back; below 0 it is "
            "owed. Lines that come together: history evens out.",
            [Query(f"{actual} - {entitled}", "{{queue}} ({{target}})")],
            "percentunit",
            floor=None,
        ),
    ]


def _weights() -> list[TimeSeries]:
    multiplier = f"{_of('queue_weight')} / on (queue) group_left () {_by_queue('queue_weight_base')}"
    return [
        timeseries(
            "Published weight",
            "Over-quota weight in force at the scheduler, by queue.",
            [Query(_of("queue_weight"), "{{queue}} ({{target}})")],
            "short",
        ),
        timeseries(
            "Weight in force over configured weight",
            "Above 1 a queue is given more than its configured weight because it has used less than its share; "
            "below 1 it gives back.",
            [Query(multiplier, "{{queue}} ({{target}})")],
            "suffix:×",
        ),
        timeseries(
            "GPUs due and held",
            "GPUs that each queue is due now (dashed) and holds.",
            [
                Query(_gpus("queue_entitled_gpus"), "{{queue}}: due"),
                Query(_gpus("queue_allocated_gpus"), "{{queue}}: held"),
            ],
            GPUS,
            looks={": due$": DASHED},
        ),
    ]


def _demand() -> list[TimeSeries]:
    return [
        timeseries(
            "Asked for",
            "GPUs that each queue requests, including those that it holds.",
            [Query(_gpus("queue_requested_gpus"), "{{queue}} ({{target}})")],
            GPUS,
        ),
        timeseries(
            "Waited for",
            "GPUs that waiting workloads need to start, by queue.",
            [Query(_waiting(), "{{queue}}")],
            GPUS,
            stacked=True,
        ),
        timeseries(
            "Longest wait",
            "How long the first of each queue's waiting workloads has waited.",
            [Query(_by_queue("queue_oldest_wait_seconds"), "{{queue}}")],
            "s",
        ),
    ]


def _preemptions() -> list[BarGauge | TimeSeries]:
    labels = {"queue": "=~$queue", "target": "=~$target"}
    stopped = promql.increase("fairshare_preempted_total", **labels)
    return [
        bars(
            "Who gave way and why, in the shown time",
            "Workloads, or parts of them, that gave way, by the queue they belong to and the ground: above its share, "
            "lower priority, and so on. What the cluster refused is not counted.",
            Query(promql.total(stopped, "queue", "ground"), "{{queue}}: {{ground}}"),
            "suffix: workloads",
            decimals=0,
        ),
        bars(
            "Work lost with them, in the shown time",
            "GPU-hours since the last checkpoint of those who gave way, by their queue.",
            Query(
                promql.hours(promql.total(promql.increase("fairshare_lost_gpu_seconds_total", **labels), "queue")),
                "{{queue}}",
                instant=True,
            ),
            GPU_HOURS,
            decimals=1,
        ),
        timeseries(
            "Claims by outcome",
            "Outcome of each claim for room in the latest cycle: there was room, others gave way, or no "
            "workload may be stopped.",
            [
                Query(
                    promql.max_by(
                        promql.series("fairshare_preemption_claims", target="=~$target"), "outcome", "target"
                    ),
                    "{{outcome}} ({{target}})",
                )
            ],
            "suffix: claims",
        ),
    ]


def _calm() -> list[TimeSeries | BarGauge]:
    labels = {"queue": "=~$queue", "target": "=~$target"}
    turned = promql.increase("fairshare_weight_moves_total", direction="turned", **labels)
    return [
        bars(
            "Turns of weights, in the shown time",
            "How often a queue's weight went the other way than the time before. Many turns with few moves between "
            "them: the law oscillates, and wants a longer window, a smaller k or a wider deadband.",
            Query(promql.total(turned, "queue", "target"), "{{queue}} ({{target}})"),
            "suffix: turns",
            decimals=0,
        ),
        timeseries(
            "Why weights stand still",
            "1 while the last good weights are held, by reason: the accountant does not answer, usage is too old or "
            "its coverage too low. 1 too while a target is degraded: its objects are missing, or a field is contested.",
            [
                Query(promql.max_by(promql.series("weights_held"), "reason"), "held: {{reason}}"),
                Query(
                    promql.max_by(promql.series("fairshare_target_degraded", target="=~$target"), "target", "reason"),
                    "degraded: {{target}}, {{reason}}",
                ),
                Query(f"0 * {promql.total(promql.series('fairshare_leader'))}", "well"),
            ],
            "short",
            looks={
                "^degraded": fixed_colour(grafana_panels.BAD),
                "^held": fixed_colour(grafana_panels.WARNING),
                "^well$": fixed_colour(grafana_panels.GOOD),
            },
        ),
        timeseries(
            "Age of usage and of the last cycle",
            "How old the usage is that weights rest on, and how long ago the controller last looked. The line is at 15 "
            "minutes, after which weights are held.",
            [
                Query(promql.max_by(promql.series("fairshare_usage_age_seconds")), "usage"),
                Query(promql.age(promql.max_by(promql.series("fairshare_last_cycle_timestamp_seconds"))), "last cycle"),
            ],
            "s",
            levels=Levels.bad_above(STALE_S),
            looks={"^usage$": fixed_colour(grafana_panels.PURPLE), "^last cycle$": fixed_colour(grafana_panels.BLUE)},
        ),
    ]
