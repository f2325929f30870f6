"""Numbers and quantities that users write where no schema checks them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from gputally.base.quantities import container_memory_mib, parse_quantity

MAIN, SIDE = "nvidia.com/container.main.gpu-memory", "nvidia.com/container.side.gpu-memory"


@pytest.mark.parametrize(("text", "value"), [
    ("10Gi", 10 * 2**30), ("1", 1), ("500m", Decimal("0.5")), ("2e3", 2_000), ("1.5Ki", 1536), ("3G", 3 * 10**9),
    ("", None), ("Gi", None), ("-1", None), ("1 Gi", None), ("NaN", None), ("1" * 40, None), ("9e99", None),
])  # fmt: skip
def test_quantities(text: str, value: Decimal | int | None) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(("annotations", "mib"), [
    ({f"{MAIN}.request": "2Gi", f"{MAIN}.limit": "4Gi"}, 2_048),
    ({f"{MAIN}.limit": "4Gi"}, 4_096),
    ({f"{MAIN}.request": "1Gi", f"{SIDE}.limit": "3Gi"}, 3_072),
    ({f"{MAIN}.request": "1.5Mi"}, 1),
    ({f"{MAIN}.request": "much", f"{MAIN}.limit": "4Gi"}, 0),
    ({f"{MAIN}.request": "-1Gi"}, 0),
    ({f"{MAIN}.mode": "2Gi", "nvidia.com/container.main.gpus.devices": "0", "gpu-memory": "5"}, 0),
    ({}, 0),
])  # fmt: skip
def test_the_gpu_memory_that_a_container_requests(annotations: dict[str, str], mib: int) -> None:
    assert container_memory_mib(annotations) == mib
