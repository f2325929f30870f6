"""Logs one JSON object per line through the standard library's logging."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_TEXT = 2_000


class JsonLines(logging.Formatter):
    """Formats time, level, logger and event, then the fields given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage()[:_MAX_TEXT],
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = repr(record.exc_info[1])[:_MAX_TEXT]
        return json.dumps(line, default=str, ensure_ascii=False)


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send everything from `level` on to `stream` (default stderr), replacing earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
