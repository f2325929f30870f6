"""Says how nice the process was when it imported this module."""

from __future__ import annotations

import os
from typing import Final

_NICENESS: Final = os.getpriority(os.PRIO_PROCESS, 0)


def read() -> int:
    return _NICENESS
