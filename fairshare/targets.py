"""The schedulers we publish to, and every kind of object that is read or written for them."""

from __future__ import annotations

from fairshare.adapters import kai, kueue, volcano
from fairshare.kinds import CONFIG_MAP, NODE, POD, Kind
from fairshare.plan import Adapter

ADAPTERS: tuple[Adapter, ...] = (kai.KaiAdapter(), kueue.KueueAdapter(), volcano.VolcanoAdapter())
KINDS: tuple[Kind, ...] = (*kai.KINDS, *kueue.KINDS, *volcano.KINDS, NODE, POD, CONFIG_MAP)
