"""Pods of a file beside the processes that the driver lists."""

from __future__ import annotations

from pathlib import Path

from agent.holders.pods_file import PodsFile
from agent.holders.process_cgroups import ProcessTable
from agent.wire import Holder
from tests.agent.holders.nvml.shown_node import GPU, NewSource, Proc, holders
from tests.agent.sample_values import CID, MIB, UID


def test_pods_hold_what_the_file_says_and_processes_say_who_was_busy(
    new_source: NewSource, proc: Proc, tmp_path: Path
) -> None:
    pods = tmp_path / "pods.yaml"
    device = "{gpu: 0, container: main, sharing: time-slicing, of: 2}"
    pods.write_text(
        f"pods:\n  - {{uid: {UID}, namespace: n, name: a, devices: [{device}]}}\n"
        f"  - {{uid: other, namespace: n, name: b, devices: [{device}]}}\n"
    )
    root = proc(10, cgroup=f"0::/kubepods/pod{UID}/{CID}")
    proc(11, comm="stranger", start=3)
    source = new_source(ProcessTable(root), PodsFile(pods, "n1"))
    source.look(0, *GPU, f"proc 10 {5 * MIB}", "proc 11 1")
    snapshot = source.look(1_000, *GPU, f"proc 10 {5 * MIB}", "proc 11 1", "pu 1000 10 40", "pu 1000 11 10")
    assert holders(snapshot) == [("pod", UID, "time-slicing"), ("pod", "other", "time-slicing")]
    readings = {r.holder.uid: r for r in snapshot.devices[0].holders}
    assert readings[UID].holder == Holder(kind="pod", uid=UID, namespace="n", name="a", container="main")
    assert (readings[UID].busy_us, readings[UID].memory_mib) == (400_000, 5)
    assert readings["11:3"].busy_us == 100_000
    assert [f.uid for f in snapshot.facts] == [UID, "other"]
    assert snapshot.sources == (("nvml", ""), ("pods", ""))
    pods.unlink()
    assert dict(source.look(2_000).sources)["pods"].endswith("No such file or directory")
