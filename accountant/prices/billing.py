"""Who pays for what: the stated policy on shared GPUs and on idle time.

It stands in the price book, under `billing`, so it is dated and versioned with the prices and every
statement names the version it was made by. These are only the choices; accountant.books.idle and
accountant.books.shared_gpus apply them, and neither makes or loses a microsecond. Pure.

    billing:
      shared_gpus: allocation          # or busy: what a holder borrowed is billed to it
      idle: {unallocated: spread, guaranteed: owner, starting: cluster}
      pools:
        interactive: {unallocated: keep}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from accountant.wire import Model


class IdlePolicy(Model):
    """unallocated: `keep` leaves it in `__idle__`; `spread` divides it over the teams of the pool, each cluster's for
    itself, by the cost of what they held there. guaranteed: `owner` first bills unused guaranteed quota to the queue's
    team, as far as there was unallocated time; `none` does not. starting (bound, no container running yet) and
    gang_waiting (running, but others of the gang are not): `holder` pays, or it is put to the `cluster`'s idle time."""

    unallocated: Literal["keep", "spread"] = "keep"
    guaranteed: Literal["none", "owner"] = "none"
    starting: Literal["holder", "cluster"] = "holder"
    gang_waiting: Literal["holder", "cluster"] = "holder"


class Billing(Model):
    """shared_gpus: `allocation` bills what was allocated. `busy` also bills busy time beyond it: it is taken
    from that GPU's unallocated time, then from its co-holders' idle time, so the bill never exceeds the GPU.
    idle: for every pool that `pools` does not name."""

    shared_gpus: Literal["allocation", "busy"] = "allocation"
    idle: IdlePolicy = IdlePolicy()
    pools: Mapping[str, IdlePolicy] = Field(default_factory=dict)

    def of_pool(self, pool: str) -> IdlePolicy:
        return self.pools.get(pool, self.idle)

    def any(self, choice: str, value: str) -> bool:
        """Whether some pool chose so."""
        return any(getattr(policy, choice) == value for policy in (self.idle, *self.pools.values()))
