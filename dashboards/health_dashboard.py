"""Builds the dashboard "Health": agents, ingest, ledger, lake and controller."""

from __future__ import annotations

from dashboards import grafana_panels, layout, promql
from dashboards.grafana_panels import BarGauge, Stat, Table, TimeSeries
from dashboards.layout import GPUS, Levels, Query, Section, bars, dashboard, fixed_colour, stat, table, timeseries

UID = "gputally-health"


def render() -> str:
    """The committed JSON text of the dashboard."""
    return dashboard(
        uid=UID,
        title="gputally / Health",
        description="Coverage, spool lag, ingest, balance of the books, and the controller.",
        variables=layout.scope(),
        sections=[
            Section("Now", 4, _now()),
            Section("Coverage and balance", 9, _books()),
            Section("Agents and their spools", 9, _agents()),
            Section("", 9, _refused()),
            Section("Ingest", 9, _ingest()),
            Section("Disk and controller", 9, _controller()),
            Section("Lake and fleet", 9, _lake()),
            Section("Cluster and versions", 9, _around()),
        ],
    )


def _now() -> list[Stat]:
    return [
        stat(
            "Coverage",
            "Metered share of the month's capacity. Below 98 % no queue weight is changed. Booked.",
            Query(promql.smallest(promql.series("ledger_coverage_ratio"))),
            "percentunit",
            Levels.good_above(0.98, warning=0.95),
            decimals=2,
        ),
        stat(
            "Imbalance",
            "GPU-seconds of the last settled hour that stand in no account or in two. Anything but 0 is a defect.",
            Query(promql.max_by(f"abs({promql.series('ledger_imbalance_seconds')})")),
            "s",
            Levels.bad_above(0.000001),
            decimals=6,
        ),
        stat(
            "Agents",
            "Agents that are scraped, and whose driver answers.",
            Query(promql.total(promql.series("nvml_up"))),
            "suffix: up",
            Levels.good_above(1),
            decimals=0,
        ),
        stat(
            "Oldest not delivered",
            "Age of the oldest record that waits in any agent's outbox. Nothing is lost while it waits; it is kept "
            "for days.",
            Query(promql.max_by(promql.series("agent_outbox_oldest_age_seconds"))),
            "s",
            Levels.bad_above(86_400, warning=900),
            decimals=0,
        ),
        stat(
            "Quarantined",
            "Records that were not booked because they contradict what is known. Their time is unmetered.",
            Query(promql.max_by(promql.series("ledger_quarantined_rows"))),
            "suffix: rows",
            Levels.warning_above(1),
            decimals=0,
        ),
        stat(
            "Disk left",
            "Room on the ledger's volume before nothing is taken in any more and agents keep it in their spools.",
            Query(promql.smallest(promql.series("ledger_room_bytes"))),
            "bytes",
            Levels.good_above(5 << 30, warning=1 << 30),
            decimals=1,
        ),
    ]


def _books() -> list[TimeSeries | BarGauge]:
    return [
        timeseries(
            "Coverage of the ledger",
            "Metered share of the month's capacity over time. The lines are at 95 % and 98 %; below 98 % weights are "
            "held. Booked.",
            [Query(promql.smallest(promql.series("ledger_coverage_ratio")), "coverage")],
            "percentunit",
            share=True,
            levels=Levels.good_above(0.98, warning=0.95),
            looks={"^coverage$": fixed_colour(grafana_panels.BLUE)},
        ),
        bars(
            "Nodes that are not metered",
            "GPUs of each node that nothing was heard of in the last settled quarter of an hour: the ten that lack "
            "most. An agent is down there, or cannot deliver. Empty where all are heard. Booked.",
            Query(promql.top(10, promql.max_by(promql.series("unmetered_gpus"), "node")), "{{node}}"),
            GPUS,
            decimals=1,
        ),
        timeseries(
            "Age of what has not arrived",
            "Oldest interval that an agent has not yet delivered, and how far the ledger's watermark and the "
            "usage that the controller works with lie behind. The line is at 15 minutes, after which weights are "
            "held.",
            [
                Query(promql.max_by(promql.series("agent_outbox_oldest_age_seconds")), "oldest in an outbox"),
                Query(promql.age(promql.smallest(promql.series("ledger_watermark_timestamp_seconds"))), "watermark"),
                Query(promql.max_by(promql.series("fairshare_usage_age_seconds")), "usage at the controller"),
            ],
            "s",
            levels=Levels.bad_above(900),
            looks={
                "^oldest": fixed_colour(grafana_panels.ORANGE),
                "^watermark$": fixed_colour(grafana_panels.BLUE),
                "^usage": fixed_colour(grafana_panels.PURPLE),
            },
        ),
    ]


def _agents() -> list[TimeSeries]:
    return [
        timeseries(
            "Records that wait",
            "Records in all outboxes together that the accountant has not confirmed.",
            [Query(promql.total(promql.series("agent_outbox_rows")), "waiting")],
            "suffix: rows",
            looks={"^waiting$": fixed_colour(grafana_panels.BLUE)},
        ),
        timeseries(
            "Largest outbox",
            "Size of the largest outbox of any agent. It is bounded; at its bound the newest is not kept any more.",
            [Query(promql.max_by(promql.series("agent_outbox_bytes")), "largest")],
            "bytes",
            looks={"^largest$": fixed_colour(grafana_panels.BLUE)},
        ),
        timeseries(
            "Sources that do not answer",
            "Agents whose source (driver, kubelet, processes) did not answer last time, by source.",
            [
                Query(
                    f"count by (collector) ({promql.series('collector_success')}) - "
                    f"{promql.total(promql.series('collector_success'), 'collector')}",
                    "{{collector}}",
                )
            ],
            "suffix: agents",
        ),
    ]


def _refused() -> list[TimeSeries]:
    return [
        timeseries(
            "Rows refused",
            "Intervals per second that were not booked: parked on the node because the accountant cannot decode "
            "them, or quarantined because they contradict what is known. Their time is unmetered.",
            [
                Query(promql.total(promql.rate("agent_rows_parked_total"), "reason"), "parked: {{reason}}"),
                Query(promql.total(promql.rate("ingest_rows_total", result="quarantined")), "quarantined"),
            ],
            "suffix: rows/s",
            looks={"^quarantined$": fixed_colour(grafana_panels.BAD)},
        ),
        timeseries(
            "Uploads",
            "Deliveries of the agents per second, by what came of them.",
            [Query(promql.total(promql.rate("agent_uploads_total"), "result"), "{{result}}")],
            "suffix:/s",
        ),
        timeseries(
            "Reading everything once",
            "How long the slowest agent took to read its devices and holders.",
            [Query(promql.max_by(promql.series("agent_sample_duration_seconds")), "slowest")],
            "s",
            looks={"^slowest$": fixed_colour(grafana_panels.BLUE)},
        ),
    ]


def _ingest() -> list[TimeSeries]:
    return [
        timeseries(
            "Rows taken in",
            "Rows of the agents' batches per second, by what became of them. A duplicate was sent again after a lost "
            "answer, and is counted once.",
            [Query(promql.total(promql.rate("ingest_rows_total"), "result"), "{{result}}")],
            "suffix: rows/s",
            looks={
                "^stored$": fixed_colour(grafana_panels.GREEN),
                "^duplicate$": fixed_colour(grafana_panels.SKY),
                "^quarantined$": fixed_colour(grafana_panels.BAD),
            },
        ),
        timeseries(
            "Batches by answer",
            "Batches per second by the HTTP status of the answer; 503 means that nothing can be stored.",
            [Query(promql.total(promql.rate("ingest_batches_total"), "code"), "{{code}}")],
            "suffix:/s",
            looks={"^200$": fixed_colour(grafana_panels.GREEN), "^5": fixed_colour(grafana_panels.BAD)},
        ),
        timeseries(
            "Time to commit",
            "From the arrival of a batch to its durable commit: half of the batches are faster than the lower line, "
            "99 % faster than the upper.",
            [
                Query(promql.quantile(0.99, "ingest_commit_seconds"), "99 %"),
                Query(promql.quantile(0.5, "ingest_commit_seconds"), "half"),
            ],
            "s",
            looks={"^99 %$": fixed_colour(grafana_panels.ORANGE), "^half$": fixed_colour(grafana_panels.GREEN)},
        ),
    ]


def _controller() -> list[TimeSeries]:
    return [
        timeseries(
            "Ledger's disk",
            "Room left on the volume, and the size of the write-ahead log, which a checkpoint empties.",
            [
                Query(promql.smallest(promql.series("ledger_room_bytes")), "room left"),
                Query(promql.max_by(promql.series("ledger_wal_bytes")), "write-ahead log"),
            ],
            "bytes",
            looks={"^room left$": fixed_colour(grafana_panels.GREEN), "^write": fixed_colour(grafana_panels.ORANGE)},
        ),
        timeseries(
            "Duration of a cycle",
            "99 % of the controller's passes were faster than this.",
            [Query(promql.quantile(0.99, "fairshare_cycle_seconds"), "99 %")],
            "s",
            looks={"^99 %$": fixed_colour(grafana_panels.BLUE)},
        ),
        timeseries(
            "Writes of the latest cycle",
            "Writes to the schedulers' objects, by target and what became of them.",
            [Query(promql.max_by(promql.series("fairshare_writes"), "target", "result"), "{{target}}: {{result}}")],
            "suffix: writes",
        ),
    ]


def _lake() -> list[TimeSeries]:
    published = "fleet_published_timestamp_seconds"
    return [
        timeseries(
            "Age of what is published",
            "How long ago the accountant began its last publication in the lake, and how long ago the figures "
            "of each ledger end there, as the fleet's pages read them. The line is at six hours.",
            [
                Query(promql.age(promql.max_by(promql.series("lake_published_timestamp_seconds"))), "this accountant"),
                Query(promql.age(promql.max_by(promql.series(published), "ledger")), "{{ledger}}"),
            ],
            "s",
            levels=Levels.warning_above(21_600),
            looks={"^this accountant$": fixed_colour(grafana_panels.BLUE)},
        ),
        timeseries(
            "Lake and ledger differ",
            "Figures that the lake and the ledger told differently when they were last compared. Anything but 0 is a "
            "defect, or another program wrote to the lake.",
            [Query(promql.max_by(promql.series("lake_differences")), "differences")],
            "suffix: figures",
            looks={"^differences$": fixed_colour(grafana_panels.BAD)},
        ),
    ]


def _around() -> list[TimeSeries | Table]:
    running = " or ".join(promql.series(f"{program}_build_info") for program in ("agent", "accountant", "fairshare"))
    return [
        timeseries(
            "Cluster's objects, age",
            "How long ago the API server last answered the accountant about each kind of object. Absent without the "
            "Kubernetes inventory.",
            [Query(promql.max_by(promql.series("inventory_age_seconds"), "kind"), "{{kind}}")],
            "s",
            levels=Levels.warning_above(900),
        ),
        timeseries(
            "Disagreements",
            "Pods that run on a GPU without holding it: where control groups and the kubelet disagree.",
            [Query(promql.total(promql.series("attribution_disagreements")), "pods")],
            "suffix: pods",
            looks={"^pods$": fixed_colour(grafana_panels.ORANGE)},
        ),
        table(
            "Versions",
            "How many of each program run, by version.",
            [
                (
                    "Running",
                    Query(
                        f"count by (job, version) ({running})",
                        instant=True,
                    ),
                )
            ],
            by=("job", "version"),
            columns={},
            unit="short",
            descending="Running",
        ),
    ]
