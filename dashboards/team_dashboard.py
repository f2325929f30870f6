"""Builds the dashboard "Team": a team's usage and cost compared with its budgets, its jobs, and its waiting workloads.

Figures of the month come from the accountant's ledger (*booked*), and most figures of present usage from the agents
(*live*). Agents know the namespace of a pod but not its team. Live panels therefore show every namespace in which the
team held GPUs this month. If two teams use the same namespace, each of them sees all of its usage."""

from __future__ import annotations

from dashboards import panels_and_variables, promql
from dashboards.cluster_dashboard import GPU_UID, IDLE_ANYWHERE
from dashboards.grafana_schema import BarGauge, Stat, TablePanel, TimeSeries
from dashboards.panels_and_variables import (
    DASHED,
    GPU_HOURS,
    GPUS,
    SHARE,
    Levels,
    PanelSection,
    Query,
    bars,
    dashboard,
    link_to,
    stat,
    table,
    timeseries,
)

UID = "gputally-team"
TEAM = "=~$team"
QUEUE = "=~$queue"
AMONG_TEAMS = "=~(.*,)?($team)(,.*)?"
"""A job of several teams lists them with commas."""
HELD = "=~busy|allocated_idle|allocated_unknown"
"""The accounts of GPU time that a team holds, used or not."""

OURS = promql.grouped(promql.series("month_namespace_gpu_seconds", team=TEAM), "cluster", "namespace")
WORKLOADS = promql.max_by(promql.series("pod_info"), "cluster", "namespace", "pod", "workload")


def render() -> str:
    """Return the dashboard as JSON text."""
    return dashboard(
        uid=UID,
        title="gputally / Team",
        description="A team's usage and cost this month against its budgets, its idle GPUs, and its waiting workloads.",
        variables=[*panels_and_variables.scope(), panels_and_variables.team(), panels_and_variables.queue_of_team()],
        sections=[
            PanelSection("This month", 4, _month()),
            PanelSection("Cost and budget", 9, _cost()),
            PanelSection("Held and idle now", 9, _now()),
            PanelSection("Jobs", 11, _jobs(), (12, 6, 6)),
            PanelSection("Waiting", 9, _waiting()),
        ],
    )


def of_ours(expression: str) -> str:
    """Restrict an expression to namespaces in which the chosen teams held GPUs this month."""
    return promql.where(expression, "cluster, namespace", OURS)


def _held_now(what: str) -> str:
    return promql.total(promql.metered(promql.rate(f"pod_gpu_{what}_seconds_total")), "cluster", "namespace")


def _month() -> list[Stat]:
    time = promql.series("month_team_gpu_seconds", team=TEAM, account=HELD)
    idle = promql.series("month_team_gpu_seconds", team=TEAM, account="allocated_idle")
    budget = promql.series("budget_spent_ratio", team=TEAM)
    forecast = promql.series("budget_forecast_ratio", team=TEAM)
    return [
        stat(
            "Cost to date",
            "Cost of the chosen teams' GPU time since the beginning of the month, before shares of idle capacity. A "
            "team with unpriced time is left out, because its cost is unknown. Booked.",
            Query(promql.total(promql.series("month_team_cost", team=TEAM), "currency"), "{{currency}}"),
            "short",
            decimals=2,
            looks=panels_and_variables.MONEY,
        ),
        stat(
            "GPU-hours to date",
            "GPU time that the chosen teams held since the beginning of the month, used or not. Booked.",
            Query(promql.hours(promql.total(time))),
            GPU_HOURS,
            decimals=0,
        ),
        stat(
            "Held idle",
            "Share of this month's held GPU time that was idle. Idle time is billed like busy time. Booked.",
            Query(promql.ratio(promql.total(idle), promql.total(time))),
            "percentunit",
            Levels.bad_above(0.5, warning=0.3),
            decimals=1,
        ),
        stat(
            "Budget used",
            "Largest share used of any budget of the chosen teams and of their queues. Booked.",
            Query(promql.max_by(budget)),
            "percentunit",
            Levels.bad_above(1, warning=0.8),
            decimals=0,
        ),
        stat(
            "Budget at the month's end",
            "Largest share of any budget that the month reaches at the rate of its days so far. Booked.",
            Query(promql.max_by(forecast)),
            "percentunit",
            Levels.bad_above(1, warning=0.9),
            decimals=0,
        ),
        stat(
            "Burn rate",
            "Cost per hour at the rate of the last quarter of an hour. Booked.",
            Query(promql.total(promql.series("burn_rate_per_hour", team=TEAM), "currency"), "{{currency}}"),
            "suffix:/h",
            decimals=2,
        ),
    ]


def _with_unit(metric: str) -> str:
    """Return a figure of each budget with the budget's unit, so that a table shows it in the row of the limit."""
    units = promql.grouped(promql.series("budget_limit", team=TEAM), "budget", "team", "queue", "unit")
    known = promql.max_by(promql.series(metric, team=TEAM), "budget", "team", "queue")
    return promql.max_by(f"{known} * on (budget, team, queue) group_left (unit) {units}", "budget", "unit")


def _cost() -> list[TimeSeries | TablePanel]:
    budgets = {
        "Limit": promql.max_by(promql.series("budget_limit", team=TEAM), "budget", "unit"),
        "Used": _with_unit("budget_spent_ratio"),
        "At month's end": _with_unit("budget_forecast_ratio"),
    }
    spent = promql.total(promql.series("month_team_cost", team=TEAM), "team", "currency")
    return [
        timeseries(
            "Cost since the month began",
            "Cost of each chosen team, which begins at 0 with each month. Booked.",
            [Query(spent, "{{team}} {{currency}}")],
            "short",
            looks=panels_and_variables.MONEY,
        ),
        table(
            "Budgets",
            "Each budget of the chosen teams and of their queues: its limit, the used share, and the share that the "
            "month reaches at its present rate. A budget with unpriced time has no share. Booked.",
            budgets,
            by=("budget", "unit"),
            columns={"Used": SHARE, "At month's end": SHARE},
            unit="short",
            descending="Used",
        ),
    ]


def _now() -> list[TimeSeries | BarGauge]:
    by_account = promql.series("team_gpus", team=TEAM, account=HELD)
    return [
        timeseries(
            "GPUs held, by account",
            "GPUs that the chosen teams hold, averaged over the last settled quarter of an hour: used, idle, and with "
            "unknown use. Booked.",
            [Query(promql.total(by_account, "account"), "{{account}}")],
            GPUS,
            stacked=True,
            looks=panels_and_variables.ACCOUNTS,
        ),
        timeseries(
            "Held and busy",
            "GPUs that pods in the teams' namespaces hold, and those of them that execute work. Live.",
            [
                Query(promql.total(of_ours(_held_now("allocated"))), "allocated"),
                Query(promql.total(of_ours(_held_now("busy"))), "busy"),
            ],
            GPUS,
            looks=panels_and_variables.CAPACITY,
        ),
        bars(
            "Idle holders",
            "GPUs that pods hold and do not use: the ten largest. Each of these pods could request fewer GPUs or end. "
            "Live.",
            Query(promql.top(10, promql.total(of_ours(IDLE_ANYWHERE), "namespace", "pod")), "{{namespace}} / {{pod}}"),
            GPUS,
            decimals=1,
        ),
    ]


def _jobs() -> list[TablePanel | BarGauge]:
    def hours(what: str) -> str:
        grown = promql.total(promql.increase(f"pod_gpu_{what}_seconds_total"), "cluster", "namespace", "pod")
        named = f"{grown} * on (cluster, namespace, pod) group_left (workload) {WORKLOADS}"
        return promql.hours(promql.total(of_ours(named), "namespace", "workload"))

    return [
        table(
            "Top jobs, in the shown time",
            "GPU-hours that each workload's pods held and used in the time range of the dashboard: the twenty that "
            "held most. A workload is the owner of the pods, such as a Job or a Deployment. Live.",
            {"Held": promql.top(20, hours("allocated")), "Used": hours("busy")},
            by=("namespace", "workload"),
            columns={"Namespace": link_to(GPU_UID, "GPUs and pods of this namespace", "namespace")},
            unit=GPU_HOURS,
            descending="Held",
            decimals=1,
        ),
        bars(
            "Cost of jobs so far",
            "The ten most expensive of the jobs that run or ended recently, with their cost from the start. Jobs with "
            "unpriced time are left out. Booked.",
            Query(
                promql.top(
                    10, promql.total(promql.series("job_cost", team=AMONG_TEAMS), "namespace", "workload", "currency")
                ),
                "{{namespace}} / {{workload}} {{currency}}",
            ),
            "short",
            decimals=0,
            looks=panels_and_variables.MONEY,
        ),
        bars(
            "GPU-hours by namespace, this month",
            "GPU time held since the beginning of the month: the ten namespaces that held most. Booked.",
            Query(
                promql.top(
                    10,
                    promql.hours(
                        promql.total(promql.series("month_namespace_gpu_seconds", team=TEAM), "team", "namespace")
                    ),
                ),
                "{{team}} / {{namespace}}",
            ),
            GPU_HOURS,
            decimals=0,
        ),
    ]


def _waiting() -> list[TimeSeries]:
    def of_queues(metric: str, *by: str) -> str:
        return promql.total(promql.of_clusters(promql.series(metric, queue=QUEUE), "queue", *by), "queue")

    held, due = of_queues("queue_allocated_gpus", "target"), of_queues("queue_due_gpus", "target")
    return [
        timeseries(
            "GPUs waited for",
            "GPUs that waiting workloads need to start, by queue. From the controller.",
            [Query(of_queues("queue_waiting_gpus"), "{{queue}}")],
            GPUS,
        ),
        timeseries(
            "Longest wait",
            "Time that the oldest waiting workload of each queue has waited. From the controller.",
            [Query(promql.max_by(promql.series("queue_oldest_wait_seconds", queue=QUEUE), "queue"), "{{queue}}")],
            "s",
            levels=Levels.warning_above(3600),
        ),
        timeseries(
            "Held and due",
            "GPUs that each queue holds, and its share with its history. A queue that holds less than its share gets "
            "the next free GPUs. From the controller.",
            [Query(held, "{{queue}}: held"), Query(due, "{{queue}}: due")],
            GPUS,
            looks={": due$": DASHED},
        ),
    ]
