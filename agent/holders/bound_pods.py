"""Keeps what pods declared of a shared GPU when they were bound to this node.

KAI's parts and groups are annotations and labels, which the owner of a pod can change at any time, but the scheduler
reads them once: as they were when the pod was first seen on this node they count, whatever is written later. They are
kept in a file beside the spool, so that a restart of the agent changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from agent.holders.api_objects import GPU_FRACTION, GPU_MEMORY, PodView
from gputally.base import atomic_file

log = logging.getLogger("agent.holders.bound_pods")

FILE = "bound-pods.json"
MAX_PODS = 5_000


class _DeclaredSharing(msgspec.Struct, frozen=True, array_like=True):
    fraction: str
    memory_mib: str
    groups: tuple[str, ...]
    queue_ref: str


_decoder = msgspec.json.Decoder(dict[str, _DeclaredSharing])


class BoundPods:
    """See the module's text. file: None keeps them for this process alone. Not thread-safe: one reflector owns it."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._declared: dict[str, _DeclaredSharing] = {}
        self._refused: set[str] = set()
        if file is not None:
            try:
                self._declared = _decoder.decode(file.read_bytes())
            except FileNotFoundError:
                pass
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("what pods declared when they were bound is not known", extra={"reason": str(error)})

    def as_bound(self, view: PodView) -> PodView:
        """The pod as it was when it was bound, as far as that decides who pays for how much."""
        if not view.bound or not (view.by_kai or view.wants_gpu or view.facts.uid in self._declared):
            return view
        uid = view.facts.uid
        now = _DeclaredSharing(view.fraction, view.memory_mib, view.groups, view.facts.queue_ref)
        known = self._declared.get(uid)
        if known is None:
            if len(self._declared) < MAX_PODS:
                self._declared[uid] = now
                self._save()
            return view
        if known == now:
            return view
        shares = known.fraction or known.memory_mib
        if shares and not known.groups and now.groups:
            # The scheduler names the group as it binds the pod.
            known = self._declared[uid] = msgspec.structs.replace(known, groups=now.groups)
            self._save()
        if known != now and uid not in self._refused:
            self._refused.add(uid)
            log.warning(
                "a pod was changed after it was bound: it is metered as it was then",
                extra={"namespace": view.facts.namespace, "pod": view.facts.name},
            )
        requests = {key: text for key, text in view.facts.requests.items() if key not in (GPU_FRACTION, GPU_MEMORY)}
        requests |= {
            key: text for key, text in ((GPU_FRACTION, known.fraction), (GPU_MEMORY, known.memory_mib)) if text
        }
        facts = msgspec.structs.replace(view.facts, requests=dict(sorted(requests.items())), queue_ref=known.queue_ref)
        wants = bool(facts.requests or known.groups or view.wants_gpu)
        return replace(
            view,
            facts=facts,
            fraction=known.fraction,
            memory_mib=known.memory_mib,
            groups=known.groups,
            wants_gpu=wants,
        )

    def keep_only(self, uids: Iterable[str]) -> None:
        """Forget the pods that are no longer on this node."""
        self._forget(self._declared.keys() - set(uids))

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self._forget({uid} & self._declared.keys())

    def _forget(self, gone: set[str]) -> None:
        for uid in gone:
            del self._declared[uid]
        self._refused -= gone
        if gone:
            self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            atomic_file.write(self._file, msgspec.json.encode(self._declared), 0o600)
        except OSError as error:
            log.warning("what pods declared when they were bound cannot be kept", extra={"reason": str(error)})
