"""What a dcgm-exporter's page says about each GPU and MIG instance, whatever its version calls it.

Only (GPU uuid, GPU instance) -> value is taken. Its pod labels say who held the device at another moment and
are never looked at. A device that several pods share is listed several times there, partly as copies of the
whole and partly as shares: the largest value is the device's. Pure: no exception escapes but ValueError
for text that is no exposition.

Source of names and units: dcgm-exporter, etc/default-counters.csv; DCGM 4.6, dcgm_fields.h (renames).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Field = Literal["busy", "sm_active", "tensor_active"]
Place = tuple[str, int | None]
"""(GPU uuid, id of the GPU instance or None for the whole device)."""
Ratios = Mapping[Place, Mapping[Field, float]]
"""Ratios from 0 to 1 of the device or of the instance itself."""

_FIELDS: Mapping[str, Field] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "busy",
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": "busy",
    "DCGM_FI_DEV_GPU_UTIL": "busy",
    "DCGM_FI_DEV_GPU_UTIL_RATIO": "busy",
    "DCGM_FI_PROF_SM_ACTIVE": "sm_active",
    "DCGM_FI_PROF_SM_UTIL_RATIO": "sm_active",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "tensor_active",
    "DCGM_FI_PROF_TENSOR_UTIL_RATIO": "tensor_active",
}
_PERCENT_FIELDS = frozenset({"DCGM_FI_DEV_GPU_UTIL"})
_OVERSHOOT = 2.0
"""A ratio of an instance is read as high as 1.3 (NVIDIA/DCGM issue 152); beyond this it is a percentage."""
_PERCENT = 100
_INSTANCE = re.compile(r"[0-9]{1,4}")


def read(text: str) -> Ratios:
    """Parse an exposition. Raises ValueError where it is none; samples that make no sense are left out."""
    found: dict[Place, dict[Field, float]] = {}
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except Exception as error:  # the parser raises whatever its string handling runs into
        raise ValueError(f"not a Prometheus exposition: {error}") from error
    for place, field, ratio in _ratios(samples):
        values = found.setdefault(place, {})
        values[field] = max(values.get(field, 0.0), ratio)
    return found


def _ratios(samples: Iterable[Sample]) -> Iterable[tuple[Place, Field, float]]:
    for sample in samples:
        field = _FIELDS.get(sample.name)
        uuid = sample.labels.get("UUID") or sample.labels.get("uuid")
        if field is None or not uuid:
            continue
        value = sample.value
        if not math.isfinite(value) or value < 0:
            continue
        percent = sample.name in _PERCENT_FIELDS or value > _OVERSHOOT
        ratio = value / _PERCENT if percent else value
        if ratio > _OVERSHOOT:  # one of DCGM's codes for "no value", which are huge numbers
            continue
        instance = sample.labels.get("GPU_I_ID", "")
        if not instance:
            yield (uuid, None), field, min(ratio, 1.0)
        elif _INSTANCE.fullmatch(instance):
            yield (uuid, int(instance)), field, min(ratio, 1.0)
