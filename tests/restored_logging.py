"""Restores the configuration of logging that a program changes when it runs inside a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def restored_logging() -> Iterator[None]:
    """Restore structlog's configuration and the root logger's level and stream handlers when the block ends.

    A fixture of module or session scope that configures logging needs this itself: `tests/conftest.py` restores only
    what the test and its function-scoped fixtures change."""
    root = logging.getLogger()
    level, known = root.level, set(root.handlers)
    configured = structlog.get_config() if structlog.is_configured() else None
    try:
        yield
    finally:
        if configured is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**configured)
        root.setLevel(level)
        for handler in [one for one in root.handlers if type(one) is logging.StreamHandler and one not in known]:
            root.removeHandler(handler)
