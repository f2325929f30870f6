"""The figures on the concepts page equal those that the code computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.doc_figures import ACCOUNTS, MINUTE_US, POOL, accounts, draw_concepts, rows, share


def test_every_minute_of_the_hour_is_in_its_accounts_and_every_account_is_met() -> None:
    parts = [accounts(row) for _, row in rows()]
    assert len(parts) == 60
    assert all(sum(part) == MINUTE_US and min(part) >= 0 for part in parts)
    assert all(sum(part[account] for part in parts) > 0 for account in range(len(ACCOUNTS)))


def test_history_counts_the_more_the_larger_k_is() -> None:
    assert [share(used, 0.0) for used in (0.0, 0.5, 1.0)] == [POOL / 2] * 3
    assert share(0.25, 2.5) == POOL / 2, "both used the same"
    assert share(0.6, 2.5) < share(0.6, 1.0) < POOL / 2 < share(0.0, 2.5)


@pytest.mark.real
def test_the_figures_are_fresh(tmp_path: Path, root: Path) -> None:
    draw_concepts(tmp_path)
    for drawn in tmp_path.iterdir():
        kept = root / "docs" / "img" / drawn.name
        assert drawn.read_bytes() == kept.read_bytes(), "draw them anew: python -m scripts.doc_figures docs/img"
