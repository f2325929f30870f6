"""An option that another option makes meaningless is an error that names it, in every command."""

from __future__ import annotations

import pytest

from gputally.__main__ import main
from tests.exports.format_cases import TEXT
from tests.plugin_cases import registered


@pytest.mark.parametrize("call", [
    f"fleet report 2026-10 --lake /nowhere [--format] {TEXT.name}",
    "fleet report 2026-10 --lake /nowhere [--team] vision",
    "accountant months [--timezone] UTC",
    "accountant months --db x [--url] http://127.0.0.1:1",
    "accountant cost --db x [--token-file] y",
    "accountant cost [--prices] x.yaml",
    "accountant proposals [--reason] x",
    "accountant waits --unused [--by] team",
    "accountant credit n1 --start 2026-10-01 --end 2026-10-02 [--approved-by] ada",
    "accountant gpus [--since] 2026-10-01",
    "accountant gpus move --node n1 --gpu GPU-a --reason x [--moved]",
    "accountant deliveries [--reason] x",
    "accountant backup [--archive] x",
    "accountant install --dry-run [--cluster] x",
    *(["accountant import prometheus http://127.0.0.1:1 --start 2026-10-01 --end 2026-10-02 [--reason] x"]
      if registered("histories.prometheus") else []),
    "fairshare what-if POLICY --trace x [--start] 3d",
    "fairshare preempt --for a/b --policy POLICY [--query] up",
    "advise autoscaler --format tfvars [--output] json",
])  # fmt: skip
def test_an_option_without_effect_is_refused(call: str, tmp_path, capsys) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema: 1\nqueues: [{name: vision, deserved: 2}]\n")
    option = call.partition("[")[2].partition("]")[0]
    arguments = call.replace("[", "").replace("]", "").replace("POLICY", str(policy)).split()
    assert main(arguments) == 2
    assert option in capsys.readouterr().err
