"""The published case of a replay and an overlap: the replay is dropped, and the overlap is clipped."""

from __future__ import annotations

import json
from datetime import datetime

from tests.shelf import shared


def test_a_replay_counts_once_and_an_overlap_is_clipped(hand, clock, ledger):
    cases = json.loads(shared("vectors/cost.json").read_text())["cases"]
    (case,) = [case for case in cases if case["id"] == "derived-duplicate-and-overlap"]
    instants = [
        [round(datetime.fromisoformat(event[edge]).timestamp() * 1000) for edge in ("start", "end")]
        for event in case["input"]["events"]
    ]
    hand.start_ms = instants[0][0]
    now = hand.start_ms + 3_600_000
    for event, (start, end) in zip(case["input"]["events"], instants, strict=True):
        number = int(event["id"].removeprefix("e"))
        minutes = ((edge - hand.start_ms) / 60_000 for edge in (start, end))
        ledger.append([hand.batch(hand.row(number, *minutes, gpu=event["gpu"]))], now)
    (line,) = ledger.usage(instants[0][0], instants[-1][1], ("gpu",))
    assert line.accounts_gpu_us.allocated == case["expect"]["gpu_seconds"] * 1_000_000
    assert ledger.imbalance(instants[0][0], instants[-1][1]) == 0
