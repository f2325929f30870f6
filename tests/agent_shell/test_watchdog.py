"""Calls that do not come back: the caller goes on, the group is refused, and returns when the call does."""

from __future__ import annotations

import threading

import pytest

from agent.devices.nvml_library import CallHangs, CallWatchdog


def test_results_and_errors_come_back_on_one_worker() -> None:
    dog = CallWatchdog()
    threads = {dog.call("a", 5, threading.get_ident), dog.call("b", 5, threading.get_ident)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    with pytest.raises(ZeroDivisionError):
        dog.call("a", 5, lambda: 1 // 0)
    assert dog.call("a", 5, lambda: 3) == 3
    assert dog.stuck == ()
    dog.close()


def test_a_call_that_hangs_is_left_behind_and_the_rest_goes_on() -> None:
    dog = CallWatchdog()
    gate, done = threading.Event(), threading.Event()

    def hang() -> None:
        gate.wait(30)
        done.set()

    with pytest.raises(CallHangs):
        dog.call("a", 0.01, hang)
    assert dog.stuck == ("a",)
    with pytest.raises(CallHangs):
        dog.call("a", 5, lambda: 1)
    assert dog.call("b", 5, lambda: 2) == 2
    gate.set()
    assert done.wait(5)
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(0.5)
    assert dog.stuck == ()
    assert dog.call("a", 5, lambda: 4) == 4
    dog.close()
