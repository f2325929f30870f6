"""The accounts of many rows at once: `accountant.accounts.split` as columns of whole numbers. Pure.

Row by row the same figures; the few rows with gaps are split one by one.
"""

from __future__ import annotations

import numpy as np

from accountant.accounts import CELLS, split
from accountant.store.writing.incoming import Incoming, Whole


def cells(incoming: Incoming) -> Whole:
    """A row of accountant.accounts.Cells for each."""
    capacity, allocated = (incoming.numbers(name).value for name in ("capacity_us", "allocated_us"))
    busy, energy, memory = (incoming.numbers(name) for name in ("busy_us", "energy_uj", "memory_mib_s"))
    by_holder = incoming.holder
    kinds = [None if held is None else held.kind for _, held in by_holder.values]
    working = ~incoming.lost
    unattributed = working & np.array([kind == "unattributed" for kind in kinds])[by_holder.of_row]
    unheld = working & np.array([kind is None for kind in kinds])[by_holder.of_row]
    held = working & ~unattributed & ~unheld
    unknown = np.where(busy.known, 0, allocated)
    booked = np.minimum(busy.value, allocated - unknown)
    found = {
        "busy_us": held * booked,
        "idle_us": held * (allocated - unknown - booked),
        "unknown_us": held * unknown,
        "unheld_us": held * (capacity - allocated) + unheld * capacity,
        "down_us": incoming.lost * capacity,
        "borrowed_us": held * (busy.value - booked),
        "unattributed_us": unattributed * busy.value,
        "memory_mib_s": memory.value,
        "energy_uj": energy.value,
        "energy_blind_us": (working & ~energy.known) * capacity,
        "memory_blind_us": (held & ~memory.known) * allocated,
    }
    table = np.stack([found[name] for name in CELLS]).T  # column after column, as Arrow wants it
    for place in incoming.with_gaps():
        table[place] = split(incoming.records[place])
    return table
