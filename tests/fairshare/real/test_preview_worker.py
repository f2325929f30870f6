"""A preview in a process of its own: its progress, its end, and its limits of memory and time."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest

from fairshare.controller import policy_file as policies
from fairshare.explain.what_if_simulation import Comparison
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web.what_if_worker import Cancelled, PreviewFailed, PreviewOrder, PreviewWorker, ProgressCallback
from gputally.base.errors import FairshareError
from gputally.base.yaml_file import parse
from tests.fairshare import samples
from tests.fairshare.conftest import NOW_MS
from tests.reports import niceness_at_import

pytestmark = pytest.mark.real


def report(order: PreviewOrder, client: AccountantApi, told: ProgressCallback) -> Comparison:
    """In place of a replay: returns its arguments. The number of days selects the behaviour."""
    told(0.0, "begun")
    if order.days == 2:
        raise FairshareError("no history")
    if order.days == 3:
        bytearray(4 << 30)
    while order.days == 4:
        threading.Event().wait(0.05)
    if order.days == 5:
        return Comparison(niceness_at_import.read(), 0, 0, order.at_ms, (), {}, ())
    return Comparison(order.days, len(order.then.queues), 0, order.at_ms, (), {}, (order.now.version(),))


def order(days: int) -> PreviewOrder:
    policy = policies.policy_of_document(parse(samples.policy_text(), "policy.yaml"))
    return PreviewOrder(policy, policy.model_copy(update={"k": 1.5}), days, NOW_MS)


WORKER = PreviewWorker(partial(AccountantApi, "http://127.0.0.1:1"), most_mib=512, compare=report)


def test_a_process_of_its_own_says_how_it_goes_and_what_came_out() -> None:
    said: list[tuple[float, str]] = []
    found = WORKER(order(1), lambda *told: said.append(told), threading.Event())
    assert (found.gpus, found.jobs, found.assumptions) == (1, 6, (order(1).now.version(),))
    assert said == [(0.0, "begun")]


def test_a_process_is_after_the_controller_in_line_before_it_imports_anything() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert WORKER(order(5), lambda *_: None, threading.Event()).gpus > own
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize(("days", "why"), [(2, "no history"), (3, "more than 512 MiB")])
def test_a_process_that_fails_says_why(days: int, why: str) -> None:
    with pytest.raises(PreviewFailed, match=why):
        WORKER(order(days), lambda *_: None, threading.Event())


def test_a_process_is_stopped_on_request_and_when_its_time_is_over() -> None:
    stop = threading.Event()
    with pytest.raises(Cancelled):
        WORKER(order(4), lambda *_: stop.set(), stop)
    hasty = PreviewWorker(WORKER.client, most_s=0.4, compare=report)
    with pytest.raises(PreviewFailed, match=r"longer than 0\.4 s"):
        hasty(order(4), lambda *_: None, threading.Event())
