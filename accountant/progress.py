"""What jobs say of their own progress: an epoch ended. Pure.

A report is one instant, named by job and epoch; several about the same epoch are one, of which the earliest
instant counts, so it does not matter how often or in what order they come. What an epoch cost is worked out from
the ledger (accountant.work.epochs); nothing that is billed depends on a report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from accountant.periods import parse_instant, zone

EPOCH_KEY: Final = "gputally.dev/epoch"
"""Annotation of a pod: the number of the last epoch its job ended, `12` or `12@2026-10-01T13:45:00Z`."""
MOST_EPOCHS: Final = 10_000
"""Of one job; later ones are refused."""
HIGHEST_EPOCH: Final = 2**31 - 1
_WORD = re.compile(r"[A-Za-z0-9._-]")
_WORDS = re.compile(r"[A-Za-z0-9._-]*")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")


class JobKey(NamedTuple):
    """A job by its names. job: `Kind/name` (accountant.inventory.workloads), `Pod/name` for a pod that stands alone."""

    cluster: str
    namespace: str
    job: str

    @property
    def id(self) -> str:
        """As it stands in an address: `prod~vision~Job~train`; other bytes than letters, digits and ._- as =XX."""
        kind, _, name = self.job.partition("/")
        return "~".join(_escaped(part) for part in (self.cluster, self.namespace, kind, name))

    @classmethod
    def parse(cls, text: str) -> JobKey:
        """The key that has this id. Raises ValueError."""
        parts = text.split("~")
        if len(parts) != len(("cluster", "namespace", "kind", "name")):
            raise ValueError(f"not the id of a job: {text[:200]!r} (write CLUSTER~NAMESPACE~KIND~NAME)")
        try:
            cluster, namespace, kind, name = (_plain(part) for part in parts)
        except UnicodeDecodeError as error:
            raise ValueError(f"not the id of a job: {text[:200]!r}") from error
        key = cls(cluster, namespace, f"{kind}/{name}" if name else kind)
        if key.id != text:
            raise ValueError(f"not the id of a job: {text[:200]!r} (it would be {key.id[:200]!r})")
        return key


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Job `key` ended epoch number `epoch` at `at_ms`. who: reported it."""

    key: JobKey
    epoch: int
    at_ms: int
    who: str


def annotated(annotations: Mapping[str, str], seen_ms: int, written_ms: int | None = None) -> tuple[int, int] | None:
    """Epoch and instant that a pod's annotation tells; without one of its own, the instant it was written at, or,
    where nobody knows that, seen at.

    None without the annotation, or where it says neither (a pod's owner may write anything there)."""
    number, _, instant = annotations.get(EPOCH_KEY, "").strip().partition("@")
    if not (number.isascii() and number.isdigit()) or len(number) > len(str(HIGHEST_EPOCH)):
        return None
    epoch = int(number)
    try:
        at_ms = (
            parse_instant(instant, zone("UTC"))
            if instant
            else min(seen_ms, seen_ms if written_ms is None else written_ms)
        )
    except (ValueError, OverflowError):
        return None
    return (epoch, at_ms) if epoch <= HIGHEST_EPOCH and 0 <= at_ms <= seen_ms else None


def _escaped(text: str) -> str:
    if _WORDS.fullmatch(text):
        return text
    return "".join(
        character if _WORD.fullmatch(character) else "".join(f"={byte:02X}" for byte in character.encode())
        for character in text
    )


def _plain(text: str) -> str:
    raw = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    return raw.encode("latin-1", errors="replace").decode()
