"""The name of another project stands in the folder of its plug-in. What else names it is listed here with its reason.
The lists only get shorter: a file that no longer has the word must leave them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("agent", "accountant", "fairshare", "gputally")
HISTORY = "accountant/histories/prometheus/"
_CHARGES = "the lake's table of charges has the columns of the export"
_INVOICE = "an invoice that is read, not a report that is written"
_OWNERS = "kinds that own pods"
_RESOURCE = "a value of the export's column ResourceType"
_DIVISION = "the division is this scheduler's, named as its source; other modules name this one"
_USAGE = "the accountant's API for this scheduler's usage queries"
_HOLDER = "jobs as holders that agents report: a word of the wire format"
_METRICS = "the accountant's own metrics, in this format"
_SAMPLE = "the sample for `gputally fairshare plan` and the like"
_WORD = "another meaning: what the keyboard goes to"
SCHEDULERS = {
    "kueue": {
        "agent/core/settings.py": "labels that are reported by default",
        "fairshare/core/admission_quota_tree.py": "the rules of lending among quotas, and their source",
    },
    "volcano": {},
    "run[:_.]?ai": {
        "fairshare/cli/command_options.py": "two options: a command's help loads no scheduler",
        "fairshare/samples/cluster.yaml": _SAMPLE,
    },
    "(?<![a-z])kai": {
        "agent/core/settings.py": "labels that are reported by default",
        "accountant/compat/kai_usage_api.py": _USAGE,
        "accountant/composition.py": _USAGE,
        "accountant/core/settings.py": _USAGE,
        "fairshare/laws/division.py": _DIVISION,
        "fairshare/samples/cluster.yaml": _SAMPLE,
        "fairshare/samples/policy.yaml": _SAMPLE,
        "gputally/base/quantities.py": "an annotation that the agent reads too, and its source",
    },
}
NAMED_ELSEWHERE = SCHEDULERS | {
    "nvml": {
        "agent/core/settings.py": "the default of gpu_readers",
        "agent/core/readings.py": "the bits of throttle reasons are NVML's",
        "agent/main_loop.py": "the metric gputally_nvml_up, on which alerts stand",
        "agent/metrics/metric_families.py": "the same, and the names of throttle reasons",
        "agent/commands/gpu_load_check.py": "checks what the driver says",
        "agent/commands/top_command.py": "shows this machine's GPUs",
        "gputally/base/gpu_model_names.py": "models as the driver writes them",
        "accountant/prices/price_book.py": "models as the driver writes them",
        "accountant/samples/price-book.yaml": "models as the driver writes them",
    },
    "dcgm": {
        "agent/core/settings.py": "dcgm_names",
        "agent/composition.py": "dcgm_names",
        "agent/metrics/dcgm_compat.py": "metrics under the exporter's names",
        "agent/holders/job_files.py": "the format of HPC job files",
        "agent/metering/reading_deltas.py": "a method of the wire format",
        "agent/wire.py": "a method of the wire format",
    },
    "slurm": {
        "accountant/core/window_decay.py": "the calculation of its decay",
        "accountant/wire/window_decays.py": "the setting that chooses it",
        "accountant/reports/focus_charge_rows.py": _RESOURCE,
        "accountant/inventory/job_kinds.py": _OWNERS,
        "accountant/prices/price_book.py": "the source of weighted prices",
        "accountant/reports/templates/report.html": _HOLDER,
        "accountant/storage/sql/holder_users.sql": _HOLDER,
        "accountant/storage/sql/withdraw_facts.sql": _HOLDER,
        "agent/wire.py": "a kind of holder, and the references to accounts",
        "gputally/kubernetes/pod_queue_labels.py": "references to accounts, and labels of its pods",
    },
    "slack": {},
    "trino": {"accountant/lake/iceberg_catalog.py": "what names and addresses other programs accept"},
    "spark(?!line)": {
        "accountant/inventory/job_kinds.py": _OWNERS,
    },
    "hami(?!lton)": {
        "accountant/histories/prometheus/exporter_series.py": "history of pods that shared GPUs by it",
        "accountant/histories/prometheus/pod_history.py": "history of pods that shared GPUs by it",
    },
    "xlsx": {},
    "pdf": {
        "accountant/notifications/subscriptions.py": "the default of a report order",
        "gputally/base/file_formats.py": "an example",
        "gputally/testing/channels.py": "an example of a message's key",
    },
    "focus": {
        "accountant/cli/bookkeeping_commands.py": _INVOICE,
        "accountant/core/settings.py": "the issuer of the charges",
        "accountant/lake/lake_comparison.py": _CHARGES,
        "accountant/lake/publisher.py": _CHARGES,
        "accountant/lake/table_rows.py": _CHARGES,
        "accountant/lake/tables.py": _CHARGES,
        "accountant/prices/price_book.py": "the source of a rule of commitments",
        "accountant/reports/focus_charge_rows.py": _CHARGES,
        "accountant/reports/statement_line_charges.py": "the charges that reports for it have",
        "accountant/storage/invoice_file.py": _INVOICE,
        "accountant/web/templates/invoice.html": _INVOICE,
        "fairshare/web/static/pages.css": _WORD,
        "gputally/server/static/site.css": _WORD,
    },
    "prometheus": {
        "accountant/api/access_control.py": _METRICS,
        "accountant/api/ledger_metrics.py": _METRICS,
        "accountant/api/operator_routes.py": _METRICS,
        "accountant/compat/kai_usage_api.py": "the queries that a scheduler sends",
        "accountant/composition.py": _METRICS,
        "accountant/core/settings.py": "the same queries, and the token for metrics",
        "accountant/fleet/fleet_server.py": _METRICS,
        "accountant/runtime/job_and_task_metrics.py": _METRICS,
    },
}
ENGINES = ("accountant/lake/engines/",)
EXPORTS = ("accountant/exports/",)
FOLDERS = dict.fromkeys(SCHEDULERS, ("fairshare/schedulers/",)) | {
    "nvml": ("agent/gpu_readers/",), "dcgm": ("agent/gpu_readers/", HISTORY),
    "trino": ENGINES, "spark(?!line)": ENGINES, "xlsx": EXPORTS, "pdf": EXPORTS, "focus": EXPORTS,
    "hami(?!lton)": ("agent/holders/",), "slurm": ("agent/holders/", "accountant/histories/slurm/"),
    "slack": ("accountant/channels/",), "prometheus": (HISTORY,),
}  # fmt: skip


PLACES = {"prometheus": ("accountant",)}
"""The programs in which a word is looked for, if not all: agent and controller have metrics in its format too."""
SUFFIXES = {".py", ".sql", ".html", ".yaml", ".css", ".js"}


@pytest.mark.parametrize("word", NAMED_ELSEWHERE)
def test_a_source_is_named_in_its_folder_alone(word: str) -> None:
    found = (path for program in PLACES.get(word, PROGRAMS) for path in (ROOT / program).rglob("*"))
    files = [path for path in found if path.suffix in SUFFIXES]
    named = {str(path.relative_to(ROOT)) for path in files if re.search(word, path.read_text("utf-8"), re.IGNORECASE)}
    outside = {path for path in named if not path.startswith(FOLDERS[word])}
    assert outside == {path for path in NAMED_ELSEWHERE[word] if (ROOT / path).exists()}, "a plug-in may be deleted"
