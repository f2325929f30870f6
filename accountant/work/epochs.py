"""What an epoch of a job cost: the job's own charges divided among the stretches between its reports.

An epoch has the time from the report before it to its own; the first one also has what came before, the start-up
included; what follows the last report belongs to no epoch yet. So reports that come late, or in another order, move
time between epochs, and epochs and rest always add up to the job.

Charges are made by the hour, as the ledger and the price book make them for anybody, and only then divided, in
proportion to the GPU time the job held in each stretch of the hour: where one price holds in an hour that is the
stretch's own time to the microsecond, and where commitments or shared GPUs mix prices nothing is lost either.
Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from accountant.books.costs import ALLOCATED, PRICED_BY, Charge, Place
from accountant.progress import EpochReport
from accountant.wire import UsageLine
from agent.units import apportion


class Stretch(NamedTuple):
    """[start_ms, end_ms) of one epoch; None: after the last report."""

    epoch: int | None
    start_ms: int
    end_ms: int


def stretches(reports: Iterable[EpochReport], start_ms: int, end_ms: int) -> list[Stretch]:
    """The span cut at the reports inside (start_ms, end_ms], by instant and number; together they are the span.

    Of epochs that ended at the same instant the lowest number has the time."""
    found: list[Stretch] = []
    begin = start_ms
    for at_ms, epoch in sorted((one.at_ms, one.epoch) for one in reports if start_ms < one.at_ms <= end_ms):
        found.append(Stretch(epoch, begin, at_ms))
        begin = at_ms
    if begin < end_ms or not found:
        found.append(Stretch(None, begin, end_ms))
    return found


Group = tuple[str, Place, str]
"""Hour, place and account of a charge."""


def divided(found: Sequence[Charge], held: Sequence[Sequence[UsageLine]]) -> list[list[Charge]]:
    """Charges by hour (their key) among stretches. held: the job's usage in each, by hour and PRICED_BY.

    Every charge is given out whole."""
    weights: dict[Group, list[int]] = defaultdict(lambda: [0] * len(held))
    in_hour: dict[str, list[int]] = defaultdict(lambda: [0] * len(held))
    for number, lines in enumerate(held):
        for line in lines:
            hour, place = line.key["hour"], Place(*(line.key[name] for name in PRICED_BY))
            for account in ALLOCATED:
                gpu_us = getattr(line.accounts_gpu_us, account)
                weights[hour, place, account][number] += gpu_us
                in_hour[hour][number] += gpu_us
    groups: dict[Group, list[Charge]] = {}
    for charge in found:
        groups.setdefault((charge.key[0], charge.place, charge.account), []).append(charge)
    shares: list[list[Charge]] = [[] for _ in held]
    for group, charges in groups.items():
        by = weights[group] if any(weights[group]) else in_hour[group[0]]
        for into, parts in zip(shares, _dealt(charges, by), strict=True):
            into.extend(parts)
    return shares


def _dealt(charges: Sequence[Charge], weights: Sequence[int]) -> list[list[Charge]]:
    """Charges of one hour, place and account: each stretch its share of all, from what is left of each."""
    left = [charge.gpu_us for charge in charges]
    dealt: list[list[Charge]] = []
    for wanted in apportion(sum(left), weights):
        taken = apportion(wanted, left) if wanted else [0] * len(left)
        left = [there - part for there, part in zip(left, taken, strict=True)]
        dealt.append([replace(charge, gpu_us=part) for charge, part in zip(charges, taken, strict=True) if part])
    return dealt
