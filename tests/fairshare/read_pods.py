"""Pods as the controller reads them."""

from __future__ import annotations

from typing import Any

from fairshare.core.gpu_demand import read_pod
from fairshare.core.queues_and_weights import Pod
from tests.fairshare.builders import pod_object


def pod_of(scheduler: str = "default-scheduler", **metadata: Any) -> Pod:
    obj = pod_object("p", **metadata)
    obj["spec"]["schedulerName"] = scheduler
    read = read_pod(obj)
    assert read is not None
    return read
