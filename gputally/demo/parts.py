"""The processes of a demo beside its own: the accountant's, and those of the agents.

They load what they need from construction on, and are made something of later, when it is known of what.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from gputally.demo.crew import Crew
from gputally.demo.letters import OFFICE
from gputally.demo.workers import Worker


class Parts:
    """An office (gputally.demo.office) and a crew. Use it as a context: leaving it shuts them down in good order.

    log_file: where their warnings go; None: only what is worse, to the terminal."""

    def __init__(self, log_file: Path | None = None) -> None:
        self.log_file = log_file
        self.office = Worker("the accountant", OFFICE, log_file=log_file)
        self.crew = Crew(log_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The agents first, which may have something left to deliver. Idempotent."""
        self.crew.close()
        self.office.close()
