"""Alerts over hours of several clusters on the real rule engine: told apart, neither flapping nor asleep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.real.promrules import proven

pytestmark = pytest.mark.real


STEPS = " ".join(f"{i * 60} {i * 60}" for i in range(1, 800))
"""A counter as it is scraped every 30 s: it moves by a whole interval of 60 s at once."""


@dataclass(frozen=True)
class Story:
    """Series sampled every 30 s, and which of an alert's clusters fire when: a cluster, or a node of one."""

    alert: str
    series: dict[str, str]
    firing: dict[str, tuple[str, ...]]
    by: str = "cluster"


def up(cluster: str, **programs: str) -> dict[str, str]:
    return {f'{name}{{cluster="{cluster}",instance="{cluster}-{name}"}}': values for name, values in programs.items()}


STORIES = {
    "the accountant of one cluster dies and comes back": Story(
        "GputallyLedgerDown",
        up("a", gputally_ledger_up="1x2000") | up("b", gputally_ledger_up="1x60 _x200 1x1000"),
        {"20m": (), "50m": ("b",), "2h": ("b",), "140m": ()},
    ),
    "the controller of one cluster dies": Story(
        "GputallyControllerStopped",
        up("a", gputally_fairshare_leader="1x2000", gputally_fairshare_last_cycle_timestamp_seconds="0+30x2000")
        | up(
            "b", gputally_fairshare_leader="1x60 stale", gputally_fairshare_last_cycle_timestamp_seconds="0+30x60 stale"
        ),
        {"20m": (), "1h": ("b",), "5h": ("b",)},
    ),
    "the leader hangs while its standby goes on looking": Story(
        "GputallyControllerStopped",
        {
            'gputally_fairshare_leader{cluster="a",instance="1"}': "1x2000",
            'gputally_fairshare_last_cycle_timestamp_seconds{cluster="a",instance="1"}': "0+30x60 1800x2000",
            'gputally_fairshare_leader{cluster="a",instance="2"}': "0x2000",
            'gputally_fairshare_cycle_interval_seconds{cluster="a",instance="2"}': "60x2000",
            'gputally_fairshare_last_cycle_timestamp_seconds{cluster="a",instance="2"}': "0+30x2000",
        },
        {"30m": (), "1h": ("a",)},
    ),
    "a controller that looks every hour has not stopped": Story(
        "GputallyControllerStopped",
        {
            'gputally_fairshare_leader{cluster="a",instance="1"}': "1x2000",
            'gputally_fairshare_cycle_interval_seconds{cluster="a",instance="1"}': "3600x2000",
            'gputally_fairshare_last_cycle_timestamp_seconds{cluster="a",instance="1"}': " ".join(
                f"{hour * 3600}x119" for hour in range(4)
            )
            + " 14400x1000",
        },
        {"50m": (), "110m": (), "5h": (), "440m": ("a",)},
    ),
    "a node reboots: its gap of four minutes is in the mean of a quarter for as long as that takes": Story(
        "GputallyAgentDown",
        {'gputally_unmetered_gpus{cluster="a",node="n1"}': "0x60 2.13x38 0x400"},
        {f"{minute}m": () for minute in range(30, 90, 3)},
        "node",
    ),
    "an agent does not come back": Story(
        "GputallyAgentDown",
        {'gputally_unmetered_gpus{cluster="a",node="n1"}': "0x60 0+0.27x30 8x1000"},
        {"30m": (), "55m": ("n1",), "5h": ("n1",)},
        "node",
    ),
    "another cluster waits, and this one's node is idle; an agent is replaced at one hour": Story(
        "GputallyIdleNode",
        {
            'gputally_gpu_info{cluster="a",gpu_uuid="G",node="n1"}': "1x1600",
            'gputally_gpu_allocated_seconds_total{cluster="a",gpu_uuid="G",instance="1"}': "600x120 stale",
            'gputally_gpu_allocated_seconds_total{cluster="a",gpu_uuid="G",instance="2"}': "_x124 0x1500",
            'gputally_queue_waiting_gpus{cluster="b",queue="nlp"}': "4x1600",
        },
        {"5h": (), "7h": ("n1",), "10h": ("n1",)},
        "node",
    ),
    "a held GPU whose counter moves by intervals is no idle node": Story(
        "GputallyIdleNode",
        {
            'gputally_gpu_info{cluster="a",gpu_uuid="G",node="n1"}': "1x1600",
            'gputally_gpu_allocated_seconds_total{cluster="a",gpu_uuid="G"}': STEPS,
        },
        {"7h": (), "10h": ()},
        "node",
    ),
    "a pod that idles is named, with intervals of a quarter of an hour too": Story(
        "GputallyIdleHolder",
        {
            'gputally_pod_gpu_allocated_seconds_total{cluster="a",gpu_uuid="G",namespace="nlp",pod="p"}': " ".join(
                f"{900 * i}x29" for i in range(60)
            ),
            'gputally_pod_gpu_busy_seconds_total{cluster="a",gpu_uuid="G",namespace="nlp",pod="p"}': "0x1800",
        },
        {"3h": (), "6h": ("p",), "9h": ("p",)},
        "pod",
    ),
    "no price book, no GPU that lacks a price": Story(
        "GputallyGpusUnpriced",
        up("a", gputally_unpriced_gpus="8x1600")
        | up("b", gputally_unpriced_gpus="8x1600", gputally_burn_rate_per_hour="0x1600"),
        {"3h": ("b",)},
    ),
    "a nightly copy on the ledger's own volume: steep for the hours around it, and no trend": Story(
        "GputallyLedgerDiskFilling",
        {'gputally_ledger_room_bytes{cluster="a"}': "20e9x2880 18e9x1200"},
        {f"{hour}h": () for hour in range(25, 32)},
    ),
    "a queue starves in one scheduler, and has its own in another": Story(
        "GputallyQueueStarving",
        {
            'gputally_queue_waiting_gpus{cluster="a",queue="q"}': "2x1600",
            'gputally_queue_allocated_gpus{cluster="a",queue="q",target="kai"}': "8x1600",
            'gputally_queue_guaranteed_gpus{cluster="a",queue="q",target="kai"}': "8x1600",
            'gputally_queue_allocated_gpus{cluster="a",queue="q",target="kueue"}': "1x1600",
            'gputally_queue_guaranteed_gpus{cluster="a",queue="q",target="kueue"}': "4x1600",
        },
        {"30m": (), "2h": ("q",)},
        "queue",
    ),
}


def test_alerts_tell_clusters_apart_and_neither_flap_nor_sleep(rules_folder: Path) -> None:
    tests = [
        (story.alert, {
            "name": name,
            "interval": "30s",
            "input_series": [{"series": series, "values": values} for series, values in story.series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count by ({story.by}) (ALERTS{{alertname="{story.alert}",alertstate="firing"}})',
                    "eval_time": at,
                    "exp_samples": [{"labels": f'{{{story.by}="{who}"}}', "value": 1} for who in firing],
                }
                for at, firing in story.firing.items()
            ],
        })
        for name, story in STORIES.items()
    ]  # fmt: skip
    proven(rules_folder, "stories", tests)
