"""The word of a plug-in's subject stands in its folder and its registration. What remains elsewhere is listed here with
what it means there; the lists only become shorter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "accountant"
_DECAY = "Slurm's own calculation of decay, a setting of windows"
_HOLDER = "jobs as holders that agents report: the seam of holders"
_METRICS = "the accountant's own metrics, in Prometheus' format"
SLURM = {
    "core/window_decay.py": _DECAY,
    "inventory/job_kinds.py": _HOLDER,
    "prices/price_book.py": "the source of weighted prices: Slurm's billing units",
    "reports/focus_charge_rows.py": _HOLDER,
    "reports/templates/report.html": _HOLDER,
    "storage/sql/holder_users.sql": _HOLDER,
    "storage/sql/withdraw_facts.sql": _HOLDER,
    "wire/window_decays.py": _DECAY,
}
PROMETHEUS = {
    "api/access_control.py": _METRICS,
    "api/ledger_metrics.py": _METRICS,
    "api/operator_routes.py": _METRICS,
    "compat/kai_usage_api.py": "the queries that KAI sends to Prometheus: the seam of exports",
    "composition.py": _METRICS,
    "core/settings.py": "the same queries, and the token for metrics",
    "fleet/fleet_server.py": _METRICS,
    "runtime/job_and_task_metrics.py": _METRICS,
}


@pytest.mark.parametrize(("word", "elsewhere"), [("slurm", SLURM), ("prometheus", PROMETHEUS)])
def test_the_word_of_a_history_stands_in_its_folder(word: str, elsewhere: dict[str, str]) -> None:
    found = set()
    for path in ROOT.rglob("*"):
        place = path.relative_to(ROOT)
        if path.suffix not in (".py", ".sql", ".html", ".yaml", ".css", ".js") or place.parts[:2] == (
            "histories",
            word,
        ):
            continue
        if re.search(word, path.read_text("utf-8"), re.IGNORECASE):
            found.add(str(place))
    assert sorted(found) == sorted(elsewhere)
