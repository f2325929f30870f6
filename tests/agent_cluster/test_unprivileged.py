"""Which user may ask the kubelet: root without a capability, and no other, as the node's own modes say."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.holders.kubelet_client import Kubelet, UnaryChannel
from gputally.base.clock import SystemClock
from tests.fakes.kubelet.server import FakeKubelet, compile_messages

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user can be taken on by root alone")
_VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3: two words of each set."""


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    """Its socket with the modes that a kubelet gives it: the folder is open to root and root's group, the socket may be
    written by root alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        inner = Path(folder) / "pod-resources"
        inner.mkdir()
        fake = FakeKubelet(compile_messages(tmp_path), inner / "kubelet.sock")
        with fake.running():
            inner.chmod(0o750)
            fake.path.chmod(0o755)
            yield fake


def failure_as(user: int, group: int, path: Path) -> str:
    """What an agent of that user, without any capability, is told by the kubelet; "" where it gets an answer."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = "the child failed"
        try:
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            header = (ctypes.c_uint32 * 2)(_VERSION, 0)
            if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0:
                clock = SystemClock()
                told = Kubelet(path, clock, UnaryChannel(path, clock)).poll().failure
        finally:
            os.write(writing, told.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return found


def test_root_needs_no_capability_to_ask_the_kubelet(kubelet: FakeKubelet) -> None:
    assert failure_as(0, 0, kubelet.path) == ""


@pytest.mark.parametrize("group", [65532, 0])
def test_another_user_is_refused_and_says_so(kubelet: FakeKubelet, group: int) -> None:
    assert "kubelet.sock: Permission denied" in failure_as(65532, group, kubelet.path)


def test_another_user_may_ask_where_the_socket_was_opened_for_its_group(kubelet: FakeKubelet) -> None:
    kubelet.path.chmod(0o775)
    assert failure_as(65532, 0, kubelet.path) == ""
