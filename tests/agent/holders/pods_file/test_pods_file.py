"""The file of pods: facts, holders, times, and faults with their line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.core.readings import Gpu
from agent.holders.pods_file import PodsFile
from agent.wire import Holder, Owner
from gputally.base.yaml_file import FileFault
from tests.agent.sample_values import T0

GPUS = (Gpu("GPU-a", 0, "NVIDIA H200", 144_384), Gpu("GPU-b", 1, "NVIDIA H200", 144_384))
FILE = """
pods:
  - uid: u1
    namespace: vision
    name: train-0
    labels: {team: vision}
    owners: [{kind: ReplicaSet, name: rs, uid: r1}, {kind: Deployment, name: train}]
    queue_ref: kai:vision
    priority: 100
    requests: {nvidia.com/gpu: "1"}
    created: 2026-09-30T22:00:00Z
    started: 2026-10-01T02:00:00+01:00
    ended: 2026-10-01T02:00:00Z
    devices: [{gpu: 0, container: main}]
  - uid: u2
    namespace: nlp
    name: notebook
    workload: Job/night
    devices:
      - {gpu: GPU-b, mig: MIG-1, sharing: time-slicing, of: 4, replicas: 2}
      - {gpu: GPU-b, sharing: fraction, fraction: 0.1}
"""


def write(path: Path, text: str, age: int = 0) -> Path:
    path.write_text(text)
    os.utime(path, ns=(age, age))
    return path


def test_facts_and_holders(tmp_path: Path) -> None:
    pods = PodsFile(write(tmp_path / "pods.yaml", FILE), "n1").read(T0 + 3_600_000, GPUS)
    first, second = pods.facts
    assert (first.uid, first.namespace, first.name, first.node) == ("u1", "vision", "train-0", "n1")
    assert first.labels == {"team": "vision"}
    assert first.owners[0] == Owner("ReplicaSet", "rs", "r1")
    assert (first.workload, second.workload) == ("Deployment/train", "Job/night")
    assert (first.queue_ref, first.priority, first.requests) == ("kai:vision", 100, {"nvidia.com/gpu": "1"})
    assert (first.created_ms, first.started_ms, first.ended_ms) == (T0 - 7_200_000, T0 + 3_600_000, T0 + 7_200_000)
    assert first.observed_ms == T0 + 3_600_000
    whole, replicas, fraction = pods.allocations
    assert (whole.gpu_uuid, whole.mig_uuid, whole.sharing) == ("GPU-a", "", None)
    assert whole.holder == Holder(kind="pod", uid="u1", namespace="vision", name="train-0", container="main")
    assert (replicas.gpu_uuid, replicas.mig_uuid) == ("GPU-b", "MIG-1")
    assert (replicas.sharing, replicas.sharing_replicas, replicas.replicas) == ("time-slicing", 4, 2)
    assert (fraction.sharing, fraction.fraction_ppm) == ("fraction", 100_000)


@pytest.mark.parametrize(
    ("at_ms", "held"), [(T0 + 3_599_999, 2), (T0 + 3_600_000, 3), (T0 + 7_199_999, 3), (T0 + 7_200_000, 2)]
)
def test_a_pod_holds_from_its_start_to_its_end(tmp_path: Path, at_ms: int, held: int) -> None:
    pods = PodsFile(write(tmp_path / "pods.yaml", FILE), "n1").read(at_ms, GPUS)
    assert len(pods.allocations) == held
    assert len(pods.facts) == 2


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    pods = PodsFile(write(tmp_path / "pods.yaml", ""), "n1").read(T0, GPUS)
    assert (pods.facts, pods.allocations, pods.fault) == ((), (), "")


def test_a_changed_file_is_read_again_and_a_broken_one_leaves_the_last_good(tmp_path: Path) -> None:
    path = write(tmp_path / "pods.yaml", FILE)
    source = PodsFile(path, "n1")
    write(path, "pods: [{uid: u9, namespace: x, name: y}]\n", age=1)
    assert [f.uid for f in source.read(T0, GPUS).facts] == ["u9"]
    write(path, "pods: [{uid: u9, namespace: x}]\n", age=2)
    broken = source.read(T0, GPUS)
    assert [f.uid for f in broken.facts] == ["u9"]
    assert broken.fault == f"{path}:1: pods.0: Object missing required field `name`"
    path.unlink()
    assert "No such file" in source.read(T0, GPUS).fault
    write(path, FILE, age=3)
    mended = source.read(T0, GPUS)
    assert (len(mended.facts), mended.fault) == (2, "")


POD = "uid: u, namespace: n, name: p"
DEVICE = "pods:\n  - uid: u\n    namespace: n\n    name: p\n    devices:\n      - "


@pytest.mark.parametrize(("text", "fault"), [
    ("pods: 5\n", ":1: pods: Expected `array`, got `int`"),
    ("pod: []\n", ":1: pod: unknown key"),
    ("pods:\n  - uid: u\n    namespace: n\n    name: p\n    gpus: 1\n", ":5: pods.0.gpus: unknown key"),
    (f"pods:\n  - {{{POD}, started: 2026-10-01T00:00:00}}\n", ":2: started: the time has no offset from UTC"),
    (DEVICE + "{gpu: 0, sharing: fraction, fraction: 1.5}\n", ":6: fraction: must be more than 0 and at most 1,"),
    (DEVICE + "{gpu: 0, sharing: mps, of: 2, replicas: 3}\n", ":6: replicas: 3 is more than `of`, 2"),
    (DEVICE + "{gpu: 0, of: 2}\n", ":6: sharing: missing"),
    (f"pods:\n  - {{{POD}}}\n  - {{{POD}}}\n", ":3: pod u is already item 0"),
    ("pods:\n  - uid: u\n    uid: v\n", ":3: key 'uid' occurs twice"),
    ("pods: [\n", ":2: "),
    (f'pods:\n  - {{{POD},\n     labels: {{a: "\\uDC80"}}}}\n', ":3: "),
    (f'pods:\n  - {{{POD},\n     labels: {{"\\uDC80": a}}}}\n', ":3: "),
])  # fmt: skip
def test_faults_are_told_with_their_line(tmp_path: Path, text: str, fault: str) -> None:
    path = write(tmp_path / "pods.yaml", text)
    with pytest.raises(FileFault) as caught:
        PodsFile(path, "n1")
    assert str(caught.value).startswith(f"{path}{fault}")


def test_a_missing_file_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileFault, match="No such file"):
        PodsFile(tmp_path / "none.yaml", "n1")
