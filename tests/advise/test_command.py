"""`gputally advise` against a real accountant: exact figures from records, in every output form."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import yaml
from structlog.testing import capture_logs

from accountant.core.settings import Settings
from agent.wire import Batch
from gputally.advise.__main__ import main
from gputally.base.clock import VirtualClock
from tests.plugin_cases import needs, registered
from tests.usage_records import QUARTER_MS, batch, interval, pod_facts, pod_holder, running_accountant

END_MS = 1_791_244_800_000  # 2026-10-06T00:00Z
HOURS = 12
PRICES = """\
schema: 1
currency: EUR
rows:
  - {id: h100, model: H100, price: "4.00", per: gpu-hour, valid_from: 2026-01-01, source: contract, as_of: 2026-01-01,
     basis: whole-instance}
  - {id: h100-spot, model: H100, capacity_type: spot, price: "1.00", per: gpu-hour, valid_from: 2026-01-01,
     source: contract, as_of: 2026-01-01, basis: whole-instance}
"""


def books() -> Batch:
    """Twelve hours of two H100: a Job uses a fifth of one and 8,000 MiB, and the other is free."""
    begin = END_MS - HOURS * 4 * QUARTER_MS
    holder = pod_holder("tune-0", "work")
    rows = []
    for quarter in range(HOURS * 4):
        at = begin + quarter * QUARTER_MS
        rows.append(interval(at, "GPU-0", holder, busy_us=180_000_000, memory_mib_s=8_000 * 900))
        rows.append(interval(at, "GPU-1", memory_mib_s=0))
    return batch(rows, [pod_facts("tune-0", begin, namespace="work", workload="Job/tune")])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    book = tmp_path_factory.mktemp("prices") / "prices.yaml"
    book.write_text(PRICES)
    settings = Settings(data=tmp_path_factory.mktemp("data"), auth="off", prices=book)
    # What it logs would stand between what the command prints.
    with capture_logs(), running_accountant(settings, VirtualClock(END_MS), books()) as (_, address):
        yield address


def run(capsys: pytest.CaptureFixture[str], url: str, *words: str) -> str:
    assert main([*words, "--url", url, "--start", "1d", "--end", "2026-10-06"]) == 0
    return capsys.readouterr().out


def test_nodes(capsys: pytest.CaptureFixture[str], url: str) -> None:
    document = json.loads(run(capsys, url, "autoscaler", "--output", "json"))
    (pool,) = document["pools"]
    assert (pool["pool"], pool["gpus_per_node"]) == ("NVIDIA H100 80GB HBM3", 2)
    assert (pool["mean_gpus_held"], pool["hours"], pool["idle_node_hours"]) == (1.0, 12, 0)
    # One of two GPUs is held: that is below three quarters, one node it stays.
    assert (pool["min_nodes"], pool["max_nodes"], pool["saving"]) == (1, 1, "0")
    assert pool["weekly"][:24] == [None] * 12 + [1] * 12
    assert "less than two weeks" in document["notes"][2]
    assert "the inventory has no node pool" in run(capsys, url, "autoscaler", "--format", "karpenter")
    written = yaml.safe_load(run(capsys, url, "autoscaler", "--format", "ansible"))
    assert list(written["gpu_node_pools"]) == ["nvidia_h100_80gb_hbm3"]
    table = run(capsys, url, "autoscaler")
    assert "nodes needed by hour of the week" in table
    rows = list(csv.DictReader(io.StringIO(run(capsys, url, "autoscaler", "--output", "csv"))))
    assert [(row["max_nodes"], row["unit_price"]) for row in rows] == [("1", "4")]


@needs("exports.json")  # the advice reads the report as JSON
def test_spot(capsys: pytest.CaptureFixture[str], url: str) -> None:
    document = json.loads(run(capsys, url, "spot", "--output", "json", "--interruption-every", "12h"))
    (job,) = document["jobs"]
    assert (job["job"], job["nodes"], job["gpu_hours"]) == ("Job/tune", 1, "12")
    assert (float(job["cost"]), float(job["spot_cost"])) == (48, 12)
    assert 48 - 12 * job["stretch"] == pytest.approx(float(job["saving"]))
    assert document["interruption_every_s"] == 43_200
    assert "assumed: a checkpoint takes 2 min" in run(capsys, url, "spot")


@needs("exports.json")
def test_sharing(capsys: pytest.CaptureFixture[str], url: str) -> None:
    (job,) = json.loads(run(capsys, url, "sharing", "--output", "json"))["jobs"]
    assert (job["job"], job["way"], job["profile"]) == ("Job/tune", "mig", "2g.20gb")
    assert (job["peak_busy"], job["memory_mib"]) == (0.2, 8_000)
    assert "MIG 2g.20gb" in run(capsys, url, "sharing")


@pytest.mark.parametrize("command", ["autoscaler", "spot", "sharing"])
def test_the_window_ends_with_the_ledgers_present_and_over_nothing_there_is_no_advice(
    capsys: pytest.CaptureFixture[str], url: str, command: str
) -> None:
    code = main([command, "--url", url, "--start", "1d", "--output", "json"])
    out, err = capsys.readouterr()
    if command != "autoscaler" and not registered("exports.json"):  # the others read the report as JSON
        assert (code, out, "format: give " in err) == (1, "", True)
        return
    assert code == 0
    document = json.loads(out)
    assert (document["end"], document["coverage"]) == ("2026-10-06T00:00:00Z", 1.0)
    assert main([command, "--url", url, "--start", "1d", "--end", "2026-09-01"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_wrong_calls_and_nobody_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (
        ["spot", "--checkpoint", "soon"],
        ["autoscaler", "--timezone", "Mars/Base"],
        ["sharing", "--start", "0d", "--end", "2026-10-06"],
    ):
        assert main(words) == 2
    assert main(["autoscaler", "--end", "yesterday"]) == 2
    capsys.readouterr()
    assert main(["spot", "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("gputally advise: http://127.0.0.1:1: ")


def test_activity(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Twelve hours of a Job that is busy for 96 % of the time, with tensor cores active for 4 %."""
    begin = END_MS - HOURS * 4 * QUARTER_MS
    used = {
        "busy_us": 864_000_000,
        "sm_active_us": 720_000_000,
        "tensor_active_us": 36_000_000,
        "memory_mib_s": 8_192 * 900,
    }
    holder, quarters = pod_holder("fp32-0", "work"), range(HOURS * 4)
    rows = [interval(begin + quarter * QUARTER_MS, "GPU-0", holder, **used) for quarter in quarters]
    facts = pod_facts("fp32-0", begin, namespace="work", workload="Job/fp32")
    settings = Settings(data=tmp_path, auth="off")
    with capture_logs(), running_accountant(settings, VirtualClock(END_MS), batch(rows, [facts])) as (_, address):
        document = json.loads(run(capsys, address, "activity", "--output", "json"))
        table = run(capsys, address, "activity")
        page = httpx2.get(f"{address}/job/c~work~Job~fp32").text
    cells = re.search(r"<th[^>]*>SM activity.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    assert cells is not None, re.sub("<[^>]*>", " ", page)
    assert re.findall(r"<td[^>]*>(.*?)</td>", cells[1])[:4] == ["96.0 %", "80.0 %", "4.0 %", "8.0"]
    (job,) = document["jobs"]
    assert (job["job"], job["finding"], job["busy"]) == ("Job/fp32", "few tensor cores", 0.96)
    assert (job["sm"], job["tensor"], job["inactive_gpu_hours"]) == (0.8333, 0.0417, 11.04)
    assert job["sm"] * job["busy"] == pytest.approx(0.8, abs=1e-3)
    assert "SM of busy" in table
    assert "96 %" in table
