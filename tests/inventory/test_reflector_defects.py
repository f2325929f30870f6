"""An object that is not understood ends no watch: it is seen, and the list begins again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping

import structlog

from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import VirtualClock
from gputally.kubernetes.list_watch import PAUSE_SECONDS, NamedObject, Reflector

PAGE = json.dumps(
    {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "n", "uid": "u", "resourceVersion": "7"}}]}
)


class Instantly(threading.Event):
    """Waits for nothing."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_a_watch_goes_on_after_an_object_that_is_not_understood() -> None:
    stop, task = Instantly(), BackgroundTasks(VirtualClock(0)).add("watch")
    seen: list[str | None] = []

    class Api:
        def get(self, *_: object, **__: object) -> bytes:
            return PAGE.encode()

        def watch(self, _path: str, _query: Mapping[str, str], **_more: object) -> Iterator[bytes]:
            stop.set()
            return iter(())

    def keep(found: NamedObject) -> str:
        seen.append(task.state().fault)
        if len(seen) < 3:
            raise AttributeError("no spec")
        return found.metadata.name

    reflector = Reflector(Api(), "/api/v1/nodes", NamedObject, keep)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logs:
        reflector.run(stop, task)
    assert seen == [None, "failed: AttributeError: no spec", "failed: AttributeError: no spec"]
    assert dict(reflector.values()) == {"u": "n"}
    assert (task.state().fault, task.state().failures, reflector.failures) == (None, 2, 2)
    assert [log["event"] for log in logs] == ["cluster_not_understood"] * 2


def test_a_watch_that_ends_at_once_is_not_begun_again_without_a_pause() -> None:
    waited: list[float | None] = []

    class Waiting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            if len(waited) == 3:
                self.set()
            return self.is_set()

    class Api:
        def get(self, *_: object, **__: object) -> bytes:
            return PAGE.encode()

        def watch(self, _path: str, _query: Mapping[str, str], **_more: object) -> Iterator[bytes]:
            return iter(())

    now_ms = [0]
    reflector = Reflector(Api(), "/api/v1/nodes", NamedObject, lambda one: one, now_ms=lambda: now_ms[0])  # type: ignore[arg-type]
    assert reflector.behind() == "nodes have not been read yet"
    reflector.run(Waiting())
    assert waited == [PAUSE_SECONDS] * 3
    assert reflector.behind() is None
    now_ms[0] = 601_000
    assert reflector.behind() == "nodes were last read 601 s ago"
