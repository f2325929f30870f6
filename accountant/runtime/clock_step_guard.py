"""The accountant's clock, which detects that the machine's clock was set, before anything gets a wrong timestamp.

The clock follows the wall clock as long as that agrees with the monotonic clock to within JUMP_MS. After a jump,
`doubt` returns the reason, and `wall_ms` follows the monotonic clock, so nothing gets a timestamp from the jump. A jump
ends in one of these ways:
- The wall clock is back.
- It was set back and has reached the time of the jump again.
- The clocks of the senders (agents) agree with the new time, which is then adopted.
- An administrator accepts the new time (`accept`).

The senders' clocks can also contradict a clock that did not jump, because it was wrong when the accountant started.
A sender has a vote only if its token is bound to one node, and each cluster counts once, whatever the number of its
nodes. So neither a token nor the issuer of another cluster can outvote the rest by inventing nodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gputally.base import atomic_file
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_MINUTE, MS_PER_SECOND
from gputally.base.untrusted_text import UNDECODABLE

JUMP_MS: Final = 30 * MS_PER_SECOND
"""If the wall clock moved by more than this against the monotonic one, it was set."""
AGREE_MS: Final = 2 * MS_PER_MINUTE
"""Maximum difference of clocks that agree; a batch may be under way for half a minute."""
SKEW_MS: Final = 5 * MS_PER_MINUTE
"""If the senders' clocks differ from ours by more than this, ours is in doubt."""
HEARD_MS: Final = 15 * MS_PER_MINUTE
"""How long the time reported by a sender counts."""
LONG_MS: Final = 15 * MS_PER_MINUTE
"""How long a jump must last before one agreeing sender is enough; it may run on the same machine."""
MOST_SENDERS: Final = 100_000
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ClockState:
    """The state of the machine's clock, as far as the guard knows it.

    doubt: why nothing may be given a timestamp, "" if the clock is trusted.
    wall_ms: the machine's clock.
    told_ms: the time that the accountant uses.
    senders: number of agents that reported their time within `HEARD_MS`.
    agreeing: how many of them agree with the machine's clock."""

    doubt: str
    wall_ms: int
    told_ms: int
    senders: int
    agreeing: int


class _Anchor(msgspec.Struct, frozen=True):
    """What the file contains. line_ms: the difference between wall clock and monotonic clock during this boot."""

    boot_id: str
    line_ms: int


_anchor = msgspec.json.Decoder(_Anchor)


class GuardedClock:
    """A clock that does not follow jumps of the machine's clock. Thread-safe.

    kept: a file through which a restarted process detects a jump within one boot; None: no file.
    boot_id: identifies the boot; "" disables the file."""

    def __init__(self, inner: Clock, kept: Path | None = None, boot_id: str = "") -> None:
        self._inner = inner
        self._kept = kept
        self._boot_id = boot_id
        self._log = structlog.get_logger("accountant.clock")
        self._lock = threading.Lock()
        self._line_ms = self._read() if kept is not None else self._wall_line()
        self._since_ms: int | None = None
        """Start of the present jump, on the monotonic clock."""
        self._contradicted = False
        self._looked_ms: int | None = None
        """Time of the last comparison with the senders, on the monotonic clock."""
        self._accepted_ms: int | None = None
        """The difference that an administrator accepted; it overrides the senders."""
        self._senders: dict[tuple[str, str], tuple[int, int]] = {}
        """The difference of each sender and when it was received, by cluster and node."""

    def wall_ms(self) -> int:
        with self._lock:
            return self._current_ms()

    def monotonic_ms(self) -> int:
        return self._inner.monotonic_ms()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        return self._inner.wait(seconds, stop)

    @property
    def doubt(self) -> str:
        """Why nothing may be given a timestamp now; "" if the clock is trusted."""
        with self._lock:
            self._current_ms()
            if self._since_ms is None and not self._contradicted:
                return ""
        return self.state().doubt

    def state(self) -> ClockState:
        """The state of the clocks, for readiness and administrators."""
        with self._lock:
            now = self._current_ms()
            wall = self._inner.wall_ms()
            lines = [line for found in self._heard(HEARD_MS).values() for line in found]
            agreeing = sum(abs(line - self._wall_line()) <= AGREE_MS for line in lines)
            doubt = ""
            if self._since_ms is not None:
                doubt = (
                    f"the machine's clock was set by {_span(wall - now)}. Nothing gets a timestamp until the clock is "
                    "back, the agents' clocks agree with it, or an administrator accepts it with: "
                    "gputally accountant clock accept"
                )
            elif self._contradicted:
                doubt = (
                    f"the clocks of {len(lines) - agreeing} of {len(lines)} agents contradict the machine's clock. "
                    "Nothing gets a timestamp until they agree: set the machine's clock"
                )
            return ClockState(doubt, wall, now, len(lines), agreeing)

    def heard(self, cluster: str, node: str, sent_ms: int | None) -> None:
        """Records the time of a sender's clock when it sent a batch; None: the sender did not report it. The caller has
        checked that the sender may report for this node."""
        if sent_ms is None:
            return
        with self._lock:
            now = self._inner.monotonic_ms()
            if (cluster, node) not in self._senders and len(self._senders) >= MOST_SENDERS:
                del self._senders[next(iter(self._senders))]
            self._senders[cluster, node] = sent_ms - now, now
            self._current_ms()
            if self._looked_ms is not None and now - self._looked_ms < MS_PER_SECOND and len(self._senders) > 100:
                return  # with many senders the comparison takes a while, so it runs at most once a second
            self._looked_ms = now
            was = self._contradicted
            self._contradicted = self._since_ms is None and self._is_contradicted()
            if self._contradicted and not was:
                self._log.error("clock_contradicted", senders=len(self._senders))
            elif was and not self._contradicted:
                self._log.info("clock_agrees_again")

    def accept(self) -> None:
        """Accepts the wall clock as right, even if the senders disagree."""
        with self._lock:
            self._contradicted = False
            self._accepted_ms = self._wall_line()
            self._over("accepted")
        self.keep()

    def keep(self) -> None:
        """Saves the clock's state for a restart of the process within this boot."""
        if self._kept is None or not self._boot_id:
            return
        with self._lock:
            self._current_ms()
            kept = _Anchor(self._boot_id, self._line_ms)
        try:
            atomic_file.save_entries(self._kept, [msgspec.json.encode(kept)])
        except OSError as error:
            self._log.warning("clock_not_kept", reason=str(error))

    def _current_ms(self) -> int:
        """The time that the accountant uses. Detects and ends jumps. The caller holds the lock."""
        now, line = self._inner.monotonic_ms(), self._wall_line()
        if abs(line - self._line_ms) <= JUMP_MS:
            if self._since_ms is not None:
                self._over("back")
            self._line_ms = line
        elif self._since_ms is None:
            self._since_ms = now
            self._log.error("clock_was_set", by_ms=line - self._line_ms)
        if self._since_ms is not None and self._is_vouched_for(line, now - self._since_ms):
            self._over("the senders agree")
        elif self._since_ms is not None and self._line_ms + self._since_ms <= line + now < self._line_ms + now:
            self._over("it was set back, and has caught up with what was dated before")
        return self._line_ms + now

    def _over(self, why: str) -> None:
        if self._since_ms is not None:
            self._log.warning("clock_is_believed_again", why=why)
        self._since_ms = None
        self._line_ms = self._wall_line()

    def _wall_line(self) -> int:
        """How far the wall clock is ahead of the monotonic one; constant unless the wall clock is set."""
        return self._inner.wall_ms() - self._inner.monotonic_ms()

    def _heard(self, within_ms: int) -> dict[str, list[int]]:
        """The differences of the senders that reported within this time, by cluster."""
        since = self._inner.monotonic_ms() - within_ms
        lines: dict[str, list[int]] = {}
        for (cluster, _), (line, at) in self._senders.items():
            if at >= since:
                lines.setdefault(cluster, []).append(line)
        return lines

    def _is_vouched_for(self, line: int, lasted_ms: int) -> bool:
        """Whether the senders that reported after the jump agree with the machine's clock."""
        lines = self._heard(lasted_ms)
        agreed = _agreed(lines)
        agreeing = sum(abs(one - line) <= AGREE_MS for found in lines.values() for one in found)
        enough = agreeing >= (1 if lasted_ms >= LONG_MS else 2)
        return enough and agreed is not None and abs(agreed - line) <= AGREE_MS

    def _is_contradicted(self) -> bool:
        """Whether the senders, at least two, agree on another time."""
        accepted = self._accepted_ms is not None and abs(self._line_ms - self._accepted_ms) <= JUMP_MS
        lines = self._heard(HEARD_MS)
        if accepted or sum(map(len, lines.values())) < 2:
            return False
        agreed = _agreed(lines)
        return agreed is not None and abs(agreed - self._line_ms) > SKEW_MS

    def _read(self) -> int:
        """The difference that an earlier process of this boot saved, or else the present one."""
        assert self._kept is not None
        try:
            entries, damage = atomic_file.load_entries(self._kept)
            anchors = [_anchor.decode(entry) for entry in entries]
        except (OSError, *UNDECODABLE) as error:
            anchors, damage = [], str(error)
        if damage:
            self._log.warning(
                "kept_clock_unreadable", reason=damage, effect="a step of the clock before this start is not noticed"
            )
        return next((kept.line_ms for kept in anchors if kept.boot_id == self._boot_id != ""), self._wall_line())


def _agreed(lines: Mapping[str, Sequence[int]]) -> int | None:
    """The difference on which more than two thirds of the clusters agree, each by more than two thirds of its senders;
    None if there is none."""
    of_clusters = [agreed for found in lines.values() if (agreed := _two_thirds(found, len(found))) is not None]
    return _two_thirds(of_clusters, len(lines))


def _two_thirds(lines: Sequence[int], voters: int) -> int | None:
    """The middle of the differences, if more than two thirds of the voters agree with it."""
    if not lines:
        return None
    middle = sorted(lines)[len(lines) // 2]
    return middle if 3 * sum(abs(line - middle) <= AGREE_MS for line in lines) > 2 * voters else None


def boot_id() -> str:
    """The boot id of the machine; "" if it has none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _span(milliseconds: int) -> str:
    seconds = abs(milliseconds) // 1000
    sign = "+" if milliseconds >= 0 else "-"
    for name, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{sign}{seconds // size} {name}"
    return f"{sign}{seconds} seconds"
