"""A store that tells when it changed, and a reflector on its thread: what following is tested with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from agent.holders.lean_list_watch import PodStore, Reflector
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock, SystemClock


class Seen(PodStore):
    """A store that can be waited for."""

    def __init__(self, clock: Clock, *labels: str) -> None:
        super().__init__("node-1", labels, clock)
        self.changed = threading.Condition()

    def replace(self, items: Sequence[bytes]) -> None:
        with self.changed:
            super().replace(items)
            self.changed.notify_all()

    def apply(self, change: str, item: bytes) -> None:
        with self.changed:
            super().apply(change, item)
            self.changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 10), sorted(self.views())

    def names(self) -> set[str]:
        return {name for _, name in self.views()}


class Following:
    """A reflector on its thread."""

    def __init__(self, reflector: Reflector) -> None:
        self.reflector = reflector
        self._stop = threading.Event()
        self.errors = list[Exception]()
        self._thread = BackgroundTasks(SystemClock()).start("watch", reflector.run, self._stop, self.errors.append)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        assert not self.errors
