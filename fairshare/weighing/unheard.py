"""Nodes whose GPUs are divided and that the ledger has never heard of: no agent runs there.

The ledger knows a GPU from its first record on, so that its coverage says nothing of those without one: usage on
them would count as none, and whoever runs there would seem to be owed what others hold. A node is given an hour to
be metered (a cluster that grows is no fault); one that was metered and is silent now lowers the coverage itself.

What is compared are nodes, weighed by the GPUs they list: a time-sliced GPU is listed several times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from accountant.wire import UsageWindow
from agent.units import BUCKET_MS, MS_PER_HOUR
from fairshare.kube.fields import look
from fairshare.kube.kinds import Object
from fairshare.kube.mapping import say
from fairshare.kube.pods import millis
from fairshare.weighing.gates import gpus_of_nodes
from fairshare.weighing.lost import quarter

Ask = Callable[[int, int], Collection[str]]
"""Nodes with a record over a span of UTC milliseconds: `fairshare.kube.ports.AccountantPort.metered_nodes`."""
SETTLED_MS: Final = MS_PER_HOUR
"""How long a new node may take until its agent is heard of."""


class Unheard:
    """Asks the accountant only while there is a node it has not told of. Belongs to one controller; not made for
    threads."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._asked: int | None = None
        self._heard: frozenset[str] = frozenset()

    def fault(self, nodes: Sequence[Object], window: UsageWindow, now_ms: int, least: float) -> str | None:
        """Why usage does not speak for the GPUs there are to divide; None: it does. nodes: those that may be given
        work. least: part of their GPUs that has to be metered. Raises AccountantUnavailable."""
        span = quarter(window, now_ms)
        if span is None:
            return None
        settled = {_name(node): gpus_of_nodes([node]) for node in nodes if _settled(node, now_ms)}
        silent = sorted(name for name, gpus in settled.items() if gpus > 0 and name not in self._heard)
        if silent and self._asked != window.watermark_ms:
            self._heard |= frozenset(self._ask(span[0], span[1] + BUCKET_MS))
            self._asked = window.watermark_ms
            silent = [name for name in silent if name not in self._heard]
        listed, missing = gpus_of_nodes(nodes), sum(settled[name] for name in silent)
        if not silent or missing <= (1 - least) * listed:
            return None
        return f"{missing:g} of {listed:g} GPUs stand on nodes that no agent has metered: {say(silent)}"


def _name(node: Object) -> str:
    return str(look(node, ("metadata", "name")))


def _settled(node: Object, now_ms: int) -> bool:
    created = millis(look(node, ("metadata", "creationTimestamp")))
    return created is not None and created <= now_ms - SETTLED_MS
