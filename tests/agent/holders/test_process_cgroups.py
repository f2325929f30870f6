"""From a process number to its holder: every known shape of a control group, and a fake process table."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.holders.process_cgroups import ProcessTable, container_in, holder_in, pods_in
from agent.wire import Holder
from tests.agent.sample_values import CID, UID
from tests.hypothesis_examples import examples

VECTORS = Path(__file__).parents[2] / "golden" / "cgroup_vectors.tsv"
OUTER = "0a1b2c3d-1111-4222-8333-444455556666"
Proc = Callable[..., Path]


def vectors() -> list[tuple[str, str, str]]:
    lines = [line for line in VECTORS.read_text().splitlines() if line and not line.startswith("#")]
    return [(uids, ids, cgroup) for uids, ids, cgroup in (line.split("\t") for line in lines)]


def test_the_vectors_are_all_there() -> None:
    assert len(vectors()) == 16


@pytest.mark.parametrize(("uids", "ids", "cgroup"), vectors())
def test_every_known_shape_of_a_control_group(uids: str, ids: str, cgroup: str) -> None:
    if uids == "-":
        assert pods_in(cgroup) == ()
        found = container_in(cgroup)
        assert found is not None
        assert found[1] == ids
    else:
        assert [(p.uid, p.container_id) for p in pods_in(cgroup)] == list(
            zip(uids.split(","), ids.split(","), strict=True)
        )
        holder = holder_in(cgroup)
        assert holder is not None
        assert (holder.kind, holder.uid) == ("pod", uids.split(",")[0])


def test_of_nested_pods_the_one_this_kubelet_knows_counts() -> None:
    cgroup = f"0::/kubepods/pod{OUTER}/{'d' * 64}/kubelet/kubepods/pod{UID}/{CID}"
    assert holder_in(cgroup, {UID}) == Holder(kind="pod", uid=UID, container=CID[:12])
    assert holder_in(cgroup, {OUTER, UID}) == Holder(kind="pod", uid=OUTER, container="d" * 12)
    assert holder_in(cgroup) == Holder(kind="pod", uid=OUTER, container="d" * 12)


@pytest.mark.parametrize(("cgroup", "runtime"), [
    (f"0::/system.slice/docker-{CID}.scope", "docker"),
    (f"5:cpu:/docker/{CID}", "docker"),
    (f"0::/machine.slice/libpod-{CID}.scope/container", "podman"),
    (f"0::/system.slice/crio-{CID}.scope", "cri-o"),
    (f"0::/../{CID}", ""),
])  # fmt: skip
def test_a_container_outside_kubernetes(cgroup: str, runtime: str) -> None:
    assert holder_in(cgroup) == Holder(kind="container", uid=CID, namespace=runtime, name=CID[:12])


@pytest.mark.parametrize("cgroup", [
    "0::/user.slice/user-1000.slice/session-3.scope",
    "0::/system.slice/cron.service",
    "0::/podcast.slice/job_server",
    "0::/system.slice/docker-notahash.scope",
    "",
])  # fmt: skip
def test_a_plain_process_is_itself(cgroup: str) -> None:
    assert holder_in(cgroup) is None


def test_a_process_is_named_by_its_number_and_start(proc: Proc) -> None:
    root = proc(10, comm="train.py", start=777, uid=os.getuid())
    user = pwd.getpwuid(os.getuid()).pw_name
    assert ProcessTable(root).holder(10) == Holder(kind="process", uid="10:777", namespace=user, name="train.py")


def test_a_user_without_a_name_is_a_number(proc: Proc) -> None:
    holder = ProcessTable(proc(10, uid=987_654)).holder(10)
    assert holder is not None
    assert holder.namespace == "987654"


def test_a_user_whose_name_is_no_utf8_can_be_sent(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pwd.struct_passwd(("j\udcf6rg", "x", 1000, 1000, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: entry)
    holder = ProcessTable(proc(10, uid=1000)).holder(10)
    assert b"rg" in msgspec.json.encode(holder)


def test_a_process_that_ended_is_still_who_it_was(proc: Proc) -> None:
    root = proc(10, cgroup=f"0::/kubepods/pod{UID}/{CID}")
    table = ProcessTable(root)
    alive = table.holder(10)
    for file in (root / "10").iterdir():
        file.unlink()
    assert table.holder(10) == alive


def test_a_number_that_is_used_again_is_somebody_else(proc: Proc) -> None:
    root = proc(10, cgroup=f"0::/kubepods/pod{UID}/{CID}", start=1)
    table = ProcessTable(root)
    table.holder(10)
    proc(10, cgroup="0::/user.slice", comm="next", start=2)
    holder = table.holder(10)
    assert holder is not None
    assert (holder.kind, holder.uid, holder.name) == ("process", "10:2", "next")


def test_a_number_outside_the_table_is_unknown(proc: Proc) -> None:
    assert ProcessTable(proc(10)).holder(11) is None


def test_this_very_process_is_found_in_the_real_table() -> None:
    holder = ProcessTable(Path("/proc")).holder(os.getpid())
    assert holder is not None
    assert holder.uid


_PIECES = st.sampled_from([
    "0::", "/kubepods", "/pod", UID, UID.replace("-", "_"), "c" * 64, "f" * 32, ".slice", "cri-containerd-", ".scope",
    "/", "/job_", "12", "/step_", "batch", "docker-", "libpod-", ":", "\n", "/../", "\udcff", "\0",
])  # fmt: skip


@settings(max_examples=examples(66, 400))
@given(st.one_of(st.text(max_size=200), st.lists(_PIECES, max_size=20).map("".join)), st.sets(st.just(UID)))
def test_no_control_group_makes_it_fail(cgroup: str, known: set[str]) -> None:
    for match in pods_in(cgroup):
        assert "_" not in match.uid
        assert len(match.container_id) in (0, 64)
    holder = holder_in(cgroup, known)
    assert holder is None or holder.uid
    container_in(cgroup)
