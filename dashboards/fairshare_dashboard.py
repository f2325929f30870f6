"""Builds the dashboard "Fairshare": the shares, weights, demand and preemptions of each queue.

All figures come from the controller. While the controller keeps the last good weights (usage is too old, or too little
of it is metered), the panels of shares and entitlements are empty, because old figures would look current."""

from __future__ import annotations

from dashboards import grafana_schema, panels_and_variables, promql
from dashboards.grafana_schema import BarGauge, Stat, TablePanel, TimeSeries
from dashboards.panels_and_variables import (
    DASHED,
    GPU_HOURS,
    GPUS,
    SHARE,
    Levels,
    PanelSection,
    Query,
    Step,
    bars,
    dashboard,
    fixed_colour,
    stat,
    table,
    timeseries,
)

UID = "gputally-fairshare"
STALE_S = 900
"""Age of usage above which the default policy changes no weight."""


def render() -> str:
    """Return the dashboard as JSON text."""
    return dashboard(
        uid=UID,
        title="gputally / Fairshare",
        description="Entitled against actual share, published weights, demand, preemptions, oscillation, staleness.",
        variables=[
            *panels_and_variables.scope(),
            panels_and_variables.target(),
            panels_and_variables.queue_of_target(),
        ],
        sections=[
            PanelSection("Now", 4, _now()),
            PanelSection("Entitled and actual share, over the policy's window", 10, _shares(), (13, 11)),
            PanelSection("Weights", 9, _weights()),
            PanelSection("Demand", 9, _demand()),
            PanelSection("Preemptions", 9, _preemptions()),
            PanelSection("Oscillation and staleness", 9, _calm()),
        ],
    )


def _of(metric: str) -> str:
    """Return a figure of the chosen queues and schedulers. If two replicas export the same series, one counts."""
    return promql.max_by(promql.series(metric, queue="=~$queue", target="=~$target"), "queue", "target")


def _gpus(metric: str) -> str:
    """Return the GPUs of the chosen queues, added up over clusters."""
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
            "Replicas that lead. If there is not exactly one, no weight changes. Of several clusters, the smallest "
            "number.",
            Query(leaders),
            "suffix: acting",
            Levels(grafana_schema.BAD, [Step(1, grafana_schema.GOOD), Step(2, grafana_schema.BAD)]),
            decimals=0,
        ),
        stat(
            "Holding",
            "Number of reasons why the controller holds the last good weights; 0 while weights follow usage.",
            Query(f"count({promql.grouped(held, 'cluster', 'reason')}) or {leaders} * 0"),
            "suffix: reasons",
            Levels.warning_above(1),
            decimals=0,
        ),
        stat(
            "Targets degraded",
            "Schedulers whose objects the controller cannot write: they are missing, contested or refused.",
            Query(f"count({promql.grouped(degraded, 'cluster', 'target')}) or {leaders} * 0"),
            "suffix: targets",
            Levels.bad_above(1),
            decimals=0,
        ),
        stat(
            "Age of usage",
            "Age of the newest usage from which weights are computed. Above 15 minutes the controller holds the "
            "weights.",
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
            "Free GPUs on which no waiting gang fits.",
            Query(promql.total(promql.of_clusters(promql.series("fairshare_stranded_gpus")))),
            GPUS,
            Levels.warning_above(1),
            decimals=0,
        ),
    ]


def _shares() -> list[TablePanel | TimeSeries]:
    fair, actual = _of("queue_configured_share_ratio"), _of("queue_usage_ratio")
    figures = {
        "Fair share": fair,
        "Actual share": actual,
        "Due now": _gpus("queue_due_gpus"),
        "Guaranteed": _gpus("queue_guaranteed_gpus"),
        "Held now": _gpus("queue_allocated_gpus"),
    }
    return [
        table(
            "Queues",
            "The share of a queue by its configured weight among competing siblings, its share over the policy's "
            "window, the GPUs that it is due with this history, its deserved quota, and the GPUs that it holds.",
            figures,
            by=("queue", "target"),
            columns={"Fair share": SHARE, "Actual share": SHARE},
            unit="short",
            descending="Actual share",
            decimals=1,
        ),
        timeseries(
            "Actual minus fair share",
            "Above 0 a queue got more than its share over the policy's window and will get less; below 0 it will get "
            "more. Lines that converge show that the history evens out.",
            [Query(f"{actual} - {fair}", "{{queue}} ({{target}})")],
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
            "Above 1 a queue gets more than by its configured weight because it used less than its share; below 1 it "
            "gets less.",
            [Query(multiplier, "{{queue}} ({{target}})")],
            "suffix:×",
        ),
        timeseries(
            "GPUs due and held",
            "GPUs that each queue is due (dashed) and that it holds.",
            [
                Query(_gpus("queue_due_gpus"), "{{queue}}: due"),
                Query(_gpus("queue_allocated_gpus"), "{{queue}}: held"),
            ],
            GPUS,
            looks={": due$": DASHED},
        ),
    ]


def _demand() -> list[TimeSeries]:
    return [
        timeseries(
            "Requested",
            "GPUs that each queue requests, including those that it holds.",
            [Query(_gpus("queue_requested_gpus"), "{{queue}} ({{target}})")],
            GPUS,
        ),
        timeseries(
            "Needed by waiting workloads",
            "GPUs that waiting workloads need to start, by queue.",
            [Query(_waiting(), "{{queue}}")],
            GPUS,
            stacked=True,
        ),
        timeseries(
            "Longest wait",
            "Time that the oldest waiting workload of each queue has waited.",
            [Query(_by_queue("queue_oldest_wait_seconds"), "{{queue}}")],
            "s",
        ),
    ]


def _preemptions() -> list[BarGauge | TimeSeries]:
    labels = {"queue": "=~$queue", "target": "=~$target"}
    stopped = promql.increase("fairshare_preempted_total", **labels)
    return [
        bars(
            "Preempted workloads, in the shown time",
            "Preempted workloads, or parts of them, by queue and ground (above its share, lower priority, …). "
            "Preemptions that the cluster refused are not counted.",
            Query(promql.total(stopped, "queue", "ground"), "{{queue}}: {{ground}}"),
            "suffix: workloads",
            decimals=0,
        ),
        bars(
            "Work lost by preemption, in the shown time",
            "GPU-hours of preempted workloads since their last checkpoint, by queue.",
            Query(
                promql.hours(promql.total(promql.increase("fairshare_lost_gpu_seconds_total", **labels), "queue")),
                "{{queue}}",
            ),
            GPU_HOURS,
            decimals=1,
        ),
        timeseries(
            "Claims by outcome",
            "Claims for GPUs in the latest cycle by outcome: GPUs were free, workloads were preempted, or no workload "
            "may be preempted.",
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
            "Number of times that a queue's weight changed its direction. Many turns with few moves between them show "
            "that weights oscillate: set a longer half-life, a smaller k or a longer interval.",
            Query(promql.total(turned, "queue", "target"), "{{queue}} ({{target}})"),
            "suffix: turns",
            decimals=0,
        ),
        timeseries(
            "Why weights do not change",
            "1 while the controller holds the last good weights, by reason: the accountant does not answer, usage is "
            "too old, or its coverage is too low. Also 1 while a target is degraded: its objects are missing, or a "
            "field is contested.",
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
                "^degraded": fixed_colour(grafana_schema.BAD),
                "^held": fixed_colour(grafana_schema.WARNING),
                "^well$": fixed_colour(grafana_schema.GOOD),
            },
        ),
        timeseries(
            "Age of usage and of the last cycle",
            "Age of the usage from which weights are computed, and time since the controller's last cycle. The line is "
            "at 15 minutes, after which the controller holds the weights.",
            [
                Query(promql.max_by(promql.series("fairshare_usage_age_seconds")), "usage"),
                Query(promql.age(promql.max_by(promql.series("fairshare_last_cycle_timestamp_seconds"))), "last cycle"),
            ],
            "s",
            levels=Levels.bad_above(STALE_S),
            looks={"^usage$": fixed_colour(grafana_schema.PURPLE), "^last cycle$": fixed_colour(grafana_schema.BLUE)},
        ),
    ]
