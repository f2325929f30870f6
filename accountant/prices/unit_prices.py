"""Defines the price of GPU time at a place and an instant, before commitments. Bills and usage windows by cost have no
other."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Final, NamedTuple

from accountant.core.claim_overlap import Span
from accountant.prices.price_book import Price, PriceBook
from gputally.base.gpu_model_names import parse_gpu_model
from gputally.base.mig_profiles import parse_mig_profile, usual_memory_gb


class Place(NamedTuple):
    """The values on which a GPU's price may depend (accountant.ledger.usage.PRICED_BY); "" if unknown."""

    gpu_model: str
    pool: str
    region: str
    capacity_type: str


MEMORY_SLICES: Final = 8


def memory_to_compute(profile: str, gpu_model: str) -> Fraction | None:
    """The factor from an instance's compute share to its memory share; 1 for a whole GPU.

    None if the profile cannot be parsed, or the model's memory is unknown."""
    if not profile:
        return Fraction(1)
    gpu, mig = parse_gpu_model(gpu_model), parse_mig_profile(profile)
    memory_gb = gpu.memory_gb or usual_memory_gb(gpu_model)
    if mig is None or not memory_gb:
        return None
    memory = max(1, round(Fraction(MEMORY_SLICES * mig.memory_gb, memory_gb)))
    return Fraction(memory * gpu.compute_slices, MEMORY_SLICES * mig.gpu_instance)


def price_edges(book: PriceBook | None, start_ms: int, end_ms: int) -> tuple[int, ...]:
    """The ends of the span and the instants in it at which a price changes, in order."""
    return (start_ms, *(book.cuts(start_ms, end_ms) if book is not None else ()), end_ms)


def pieces(book: PriceBook | None, start_ms: int, end_ms: int) -> list[Span]:
    """The span, split where a price changes, in order."""
    return list(pairwise(price_edges(book, start_ms, end_ms)))


def unit_price(book: PriceBook | None, place: Place, at_ms: int, profile: str = "") -> Price | None:
    """The price of time at a place, from the start of one of the `pieces` to its end, before commitments; None without
    one. Bills and usage windows by cost have no other.

    profile: the MIG profile of an instance that is billed by its memory. It has no price if its part of the GPU's
        memory is unknown."""
    if book is None or memory_to_compute(profile, place.gpu_model) is None:
        return None
    return book.unit_price(place.gpu_model, at_ms, place.pool, place.region, place.capacity_type)


def rate(book: PriceBook, place: Place, at_ms: int, profile: str = "") -> Fraction | None:
    """The `unit_price` of an hour of compute slices, exactly: an instance that is billed by its memory pays for more
    or less time than it holds (accountant.billing.time_reallocation.by_memory)."""
    price, share = unit_price(book, place, at_ms, profile), memory_to_compute(profile, place.gpu_model)
    return None if price is None or share is None else Fraction(price.price) * share
