"""How a window looks at quarter-hours: whose GPUs, and how fast their usage is forgotten. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class View(NamedTuple):
    """half_life_s: in seconds; None: nothing decays. cluster: its GPUs alone; None: everybody's.

    What is remembered is remembered by view: a row is of the cluster whose agent sent it, for ever."""

    half_life_s: int | None
    cluster: str | None = None

    @property
    def only(self) -> str:
        """The condition on rows `e` of the ledger."""
        return "" if self.cluster is None else "AND e.gpu IN (SELECT id FROM gpu WHERE cluster = $cluster)"

    @property
    def given(self) -> Mapping[str, str]:
        """The parameters of `only`."""
        return {} if self.cluster is None else {"cluster": self.cluster}


EVERYBODY: Final = View(None)
