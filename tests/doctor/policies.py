"""Policies of the doctor's tests."""

from __future__ import annotations

from typing import Any

from accountant.wire.policy_models import Policy


def policy(*queues: dict[str, Any], **more: Any) -> Policy:
    return Policy.model_validate({"queues": list(queues) or [{"name": "a", "refs": ("fake:a",)}], **more})
