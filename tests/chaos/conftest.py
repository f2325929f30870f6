"""What forks the programs, once for all tests of a process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.chaos.accountant_process import ready


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    with ready() as found:
        yield found
