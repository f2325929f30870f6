"""Builds the dashboard "Health": agents, ingest, ledger, lake and controller."""

from __future__ import annotations

from dashboards import grafana_schema, panels_and_variables, promql
from dashboards.grafana_schema import BarGauge, Stat, TablePanel, TimeSeries
from dashboards.panels_and_variables import (
    GPUS,
    Levels,
    PanelSection,
    Query,
    bars,
    dashboard,
    fixed_colour,
    stat,
    table,
    timeseries,
)

UID = "gputally-health"


def render() -> str:
    """Return the dashboard as JSON text."""
    return dashboard(
        uid=UID,
        title="gputally / Health",
        description="Coverage, spool lag, ingest, the balance of the ledger, and the controller.",
        variables=panels_and_variables.scope(),
        sections=[
            PanelSection("Now", 4, _now()),
            PanelSection("Coverage and balance", 9, _books()),
            PanelSection("Agents and their spools", 9, _agents()),
            PanelSection("", 9, _refused()),
            PanelSection("Ingest", 9, _ingest()),
            PanelSection("Disk and controller", 9, _controller()),
            PanelSection("Lake and fleet", 9, _lake()),
            PanelSection("Cluster and versions", 9, _around()),
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
            "GPU-seconds of the last settled hour that are in no account or in two. Any value but 0 is a defect.",
            Query(promql.max_by(f"abs({promql.series('ledger_imbalance_seconds')})")),
            "s",
            Levels.bad_above(0.000001),
            decimals=6,
        ),
        stat(
            "Agents",
            "Number of scraped agents whose driver answers.",
            Query(promql.total(promql.series("nvml_up"))),
            "suffix: up",
            Levels.good_above(1),
            decimals=0,
        ),
        stat(
            "Oldest not delivered",
            "Age of the oldest record in any agent's outbox that the accountant has not confirmed. The agent keeps "
            "it for days, so no record is lost meanwhile.",
            Query(promql.max_by(promql.series("agent_outbox_oldest_age_seconds"))),
            "s",
            Levels.bad_above(86_400, warning=900),
            decimals=0,
        ),
        stat(
            "Quarantined",
            "Records that were not booked because they contradict other records. Their time is unmetered.",
            Query(promql.max_by(promql.series("ledger_quarantined_rows"))),
            "suffix: rows",
            Levels.warning_above(1),
            decimals=0,
        ),
        stat(
            "Disk left",
            "Free space on the ledger's volume until the accountant refuses batches and agents keep them in their "
            "spools.",
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
            looks={"^coverage$": fixed_colour(grafana_schema.BLUE)},
        ),
        bars(
            "Nodes that are not metered",
            "GPUs of each node without a record in the last settled quarter of an hour: the ten nodes with the most. "
            "Their agent is down or cannot deliver. Empty if all GPUs have records. Booked.",
            Query(promql.top(10, promql.max_by(promql.series("unmetered_gpus"), "node")), "{{node}}"),
            GPUS,
            decimals=1,
        ),
        timeseries(
            "Age of records that have not arrived",
            "Age of the oldest interval that an agent has not yet delivered, of the ledger's watermark, and of the "
            "usage that the controller works with. The line is at 15 minutes, after which the controller holds the "
            "weights.",
            [
                Query(promql.max_by(promql.series("agent_outbox_oldest_age_seconds")), "oldest in an outbox"),
                Query(promql.age(promql.smallest(promql.series("ledger_watermark_timestamp_seconds"))), "watermark"),
                Query(promql.max_by(promql.series("fairshare_usage_age_seconds")), "usage at the controller"),
            ],
            "s",
            levels=Levels.bad_above(900),
            looks={
                "^oldest": fixed_colour(grafana_schema.ORANGE),
                "^watermark$": fixed_colour(grafana_schema.BLUE),
                "^usage": fixed_colour(grafana_schema.PURPLE),
            },
        ),
    ]


def _agents() -> list[TimeSeries]:
    return [
        timeseries(
            "Records not confirmed",
            "Records in all outboxes that the accountant has not confirmed.",
            [Query(promql.total(promql.series("agent_outbox_rows")), "waiting")],
            "suffix: rows",
            looks={"^waiting$": fixed_colour(grafana_schema.BLUE)},
        ),
        timeseries(
            "Largest outbox",
            "Size of the largest outbox of any agent. An outbox at its size limit keeps no new records.",
            [Query(promql.max_by(promql.series("agent_outbox_bytes")), "largest")],
            "bytes",
            looks={"^largest$": fixed_colour(grafana_schema.BLUE)},
        ),
        timeseries(
            "Sources that do not answer",
            "Agents whose source (driver, kubelet, processes) did not answer the last time, by source.",
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
            "them, or quarantined because they contradict other records. Their time is unmetered.",
            [
                Query(promql.total(promql.rate("agent_rows_parked_total"), "reason"), "parked: {{reason}}"),
                Query(promql.total(promql.rate("ingest_rows_total", result="quarantined")), "quarantined"),
            ],
            "suffix: rows/s",
            looks={"^quarantined$": fixed_colour(grafana_schema.BAD)},
        ),
        timeseries(
            "Uploads",
            "Deliveries of the agents per second, by result.",
            [Query(promql.total(promql.rate("agent_uploads_total"), "result"), "{{result}}")],
            "suffix:/s",
        ),
        timeseries(
            "Duration of a reading",
            "Time that the slowest agent took to read its devices and holders once.",
            [Query(promql.max_by(promql.series("agent_sample_duration_seconds")), "slowest")],
            "s",
            looks={"^slowest$": fixed_colour(grafana_schema.BLUE)},
        ),
    ]


def _ingest() -> list[TimeSeries]:
    return [
        timeseries(
            "Received rows",
            "Rows of the agents' batches per second, by result. A duplicate was sent again after a lost answer, and "
            "is booked once.",
            [Query(promql.total(promql.rate("ingest_rows_total"), "result"), "{{result}}")],
            "suffix: rows/s",
            looks={
                "^stored$": fixed_colour(grafana_schema.GREEN),
                "^duplicate$": fixed_colour(grafana_schema.SKY),
                "^quarantined$": fixed_colour(grafana_schema.BAD),
            },
        ),
        timeseries(
            "Batches by answer",
            "Batches per second by the HTTP status of the answer; 503 means that the ledger can store no rows.",
            [Query(promql.total(promql.rate("ingest_batches_total"), "code"), "{{code}}")],
            "suffix:/s",
            looks={"^200$": fixed_colour(grafana_schema.GREEN), "^5": fixed_colour(grafana_schema.BAD)},
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
            looks={"^99 %$": fixed_colour(grafana_schema.ORANGE), "^half$": fixed_colour(grafana_schema.GREEN)},
        ),
    ]


def _controller() -> list[TimeSeries]:
    return [
        timeseries(
            "Ledger's disk",
            "Free space on the volume, and the size of the write-ahead log, which a checkpoint empties.",
            [
                Query(promql.smallest(promql.series("ledger_room_bytes")), "room left"),
                Query(promql.max_by(promql.series("ledger_wal_bytes")), "write-ahead log"),
            ],
            "bytes",
            looks={"^room left$": fixed_colour(grafana_schema.GREEN), "^write": fixed_colour(grafana_schema.ORANGE)},
        ),
        timeseries(
            "Duration of a cycle",
            "99 % of the controller's cycles were faster than this.",
            [Query(promql.quantile(0.99, "fairshare_cycle_seconds"), "99 %")],
            "s",
            looks={"^99 %$": fixed_colour(grafana_schema.BLUE)},
        ),
        timeseries(
            "Writes of the latest cycle",
            "Writes to the schedulers' objects, by target and result.",
            [Query(promql.max_by(promql.series("fairshare_writes"), "target", "result"), "{{target}}: {{result}}")],
            "suffix: writes",
        ),
    ]


def _lake() -> list[TimeSeries]:
    published = "fleet_published_timestamp_seconds"
    return [
        timeseries(
            "Age of the published figures",
            "Time since the accountant began its last publication in the lake, and since the end of each ledger's "
            "figures there, as the fleet's pages read them. The line is at six hours.",
            [
                Query(promql.age(promql.max_by(promql.series("lake_published_timestamp_seconds"))), "this accountant"),
                Query(promql.age(promql.max_by(promql.series(published), "ledger")), "{{ledger}}"),
            ],
            "s",
            levels=Levels.warning_above(21_600),
            looks={"^this accountant$": fixed_colour(grafana_schema.BLUE)},
        ),
        timeseries(
            "Lake and ledger differ",
            "Figures that differed between the lake and the ledger at their last comparison. Any value but 0 is a "
            "defect, or another program wrote to the lake.",
            [Query(promql.max_by(promql.series("lake_differences")), "differences")],
            "suffix: figures",
            looks={"^differences$": fixed_colour(grafana_schema.BAD)},
        ),
    ]


def _around() -> list[TimeSeries | TablePanel]:
    running = " or ".join(promql.series(f"{program}_build_info") for program in ("agent", "accountant", "fairshare"))
    return [
        timeseries(
            "Age of the cluster's objects",
            "Time since the API server last answered the accountant, by kind of object. Empty without the "
            "Kubernetes inventory.",
            [Query(promql.max_by(promql.series("inventory_age_seconds"), "kind"), "{{kind}}")],
            "s",
            levels=Levels.warning_above(900),
        ),
        timeseries(
            "Disagreements",
            "Pods with processes on a GPU that they do not hold: control groups and the kubelet disagree.",
            [Query(promql.total(promql.series("attribution_disagreements")), "pods")],
            "suffix: pods",
            looks={"^pods$": fixed_colour(grafana_schema.ORANGE)},
        ),
        table(
            "Versions",
            "Number of running instances of each program, by version.",
            {"Running": f"count by (job, version) ({running})"},
            by=("job", "version"),
            columns={},
            unit="short",
            descending="Running",
        ),
    ]
