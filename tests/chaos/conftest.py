"""The fork server that all kill tests of a process share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.chaos.accountant_process import fork_server


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    with fork_server() as found:
        yield found
