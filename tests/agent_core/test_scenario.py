"""Scenario files: what they can say, and the place of every fault in them."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

import agent.simulation.scenario_file
from agent.core.readings import Unavailable
from agent.simulation.scenario_file import load_scenario
from agent.simulation.simulated_node import NodeOffline
from gputally.base.yaml_file import FileFault

T = 1_790_812_800_000


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "node.yaml"
    path.write_text(dedent(text), encoding="utf-8")
    return path


def documented_example() -> str:
    match = re.search(r"```yaml\n(.*?)```", agent.simulation.scenario_file.__doc__ or "", re.DOTALL)
    assert match is not None
    return match[1]


def test_the_documented_example_runs(tmp_path: Path) -> None:
    source = load_scenario(write(tmp_path, documented_example()), "node-1", T)
    first = source.snapshot(T)
    assert [d.gpu.uuid for d in first.devices] == ["GPU-node-1-0", "GPU-a"]
    assert not isinstance(first.allocations, Unavailable)
    assert [a.holder.name for a in first.allocations] == ["train-0", "notebook"]
    assert [(f.name, f.queue_ref, f.labels) for f in first.facts] == [
        ("train-0", "kai:vision", {"app": "train"}),
        ("notebook", "", {}),
    ]
    assert source.snapshot(T + 11_000).devices[0].health == "lost"
    last = source.snapshot(T + 14_500)
    assert last.allocations == Unavailable("kubelet gone")
    with pytest.raises(NodeOffline):
        source.snapshot(T + 15_000)
    assert source.node.busy_us("train-0", T, T + 9_000) == 5_000 * 900 + 4_000 * 400


def test_relative_times_count_from_the_start_of_the_agent_where_no_origin_is_given(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        gpus: [{model: H100}]
        events:
          - {after_ms: 500, place: {gpu: 0, pod: late, of_replicas: 4, replicas: 3}}
          - {at_ms: 1790812800100, place: {gpu: 0, pod: early, fraction_ppm: 250000}}
        """,
    )
    source = load_scenario(path, "n", T)
    shown = source.snapshot(T + 1_000).allocations
    assert not isinstance(shown, Unavailable)
    assert [(a.holder.name, a.sharing, a.sharing_replicas, a.replicas, a.fraction_ppm) for a in shown] == [
        ("early", "fraction", 0, 1, 250_000),
        ("late", "time-slicing", 4, 3, None),
    ]
    assert source.node.allocated_us("late", T, T + 1_000) == 375_000


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gpus: [{model: H100, colour: red}]\n", "node.yaml:1: gpus.0.colour: unknown key"),
        ("gpus:\n  - {model: V100}\n", "node.yaml:2: unknown GPU model 'V100'"),
        ("gpus:\n  - {model: A100, mig: [9g]}\n", "node.yaml:2: unknown MIG profile '9g'"),
        ("gpus: [{model: H100, uuid: x}, {model: H100, uuid: x}]\n", "node.yaml:1: two GPUs have the same uuid"),
        (
            "gpus: [{model: H100}]\nevents:\n  - {after_ms: 1}\n",
            "node.yaml:3: an event needs exactly one of place",
        ),
        (
            "gpus: [{model: H100}]\nevents:\n  - {lose: 0}\n",
            "node.yaml:3: an event needs exactly one of at_ms",
        ),
        ("gpus: [{model: H100}]\nevents:\n  - {after_ms: 1, lose: 3}\n", "node.yaml:3: no GPU 3: the node has 1"),
        (
            "gpus: [{model: H100}]\nevents:\n  - {after_ms: 1, remove: a}\n",
            "node.yaml:3: a holds no device",
        ),
        (
            "gpus: [{model: H100}]\nevents:\n  - {after_ms: 1, place: {gpu: 0, pod: a, mig: 0}}\n",
            "node.yaml:3: no MIG instance 0: GPU 0 has 0",
        ),
    ],
)
def test_every_fault_has_its_place(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(FileFault) as caught:
        load_scenario(write(tmp_path, text), "n", T)
    assert fault in str(caught.value)
