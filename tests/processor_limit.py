"""Limits the processor time that a test may take."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_S = 10.0
"""Processor time of this process that one text may take; a thousand times what it takes."""


class TooLongAtIt(BaseException):
    """A text took more processor time than it may."""


@contextmanager
def processor_limit() -> Iterator[None]:
    """End what takes more processor time than MOST_S."""
    assert threading.current_thread() is threading.main_thread()

    def stop(*_: object) -> None:
        raise TooLongAtIt

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)
