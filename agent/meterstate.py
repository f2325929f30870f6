"""What a meter remembers over a restart: who held which GPU up to which closed end.

Stored with the closed sets in one transaction, so it never claims more than is spooled. It is worth
something within one boot of the node only: a reboot ends every holder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec

from agent.model import Allocation, Gpu
from agent.wire import Health

_VERSION = 1


class Held(msgspec.Struct, frozen=True):
    """One GPU as it was at its last closed end."""

    closed_ms: int
    health: Health
    gpu: Gpu
    allocations: tuple[Allocation, ...]
    idle_power_mw: int | None = None

    def moved(self, by_ms: int) -> Held:
        """The same with its closed end as much later."""
        return msgspec.structs.replace(self, closed_ms=self.closed_ms + by_ms)


class Kept(msgspec.Struct, frozen=True):
    """A `Held` whose larger parts are encoded already: they outlast many a closed end."""

    closed_ms: int
    health: Health
    gpu: msgspec.Raw
    allocations: msgspec.Raw
    idle_power_mw: int | None


class _State(msgspec.Struct, frozen=True):
    version: int
    boot_id: str
    gpus: tuple[Held, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_State)


def encode(boot_id: str, gpus: Iterable[Held | Kept]) -> bytes:
    # Encoded, a Kept is the Held that it stands for.
    return _ENCODER.encode(_State(_VERSION, boot_id, cast(tuple[Held, ...], tuple(gpus))))


def encode_part(part: Gpu | tuple[Allocation, ...]) -> msgspec.Raw:
    """A part of a `Kept`."""
    return msgspec.Raw(_ENCODER.encode(part))


def moved(state: bytes, boot_id: str, by_ms: int) -> bytes:
    """A saved state as much later, for a clock that was set."""
    return encode(boot_id, [held.moved(by_ms) for held in decode(state, boot_id)])


def decode(state: bytes, boot_id: str) -> tuple[Held, ...]:
    """The GPUs of a saved state; none where it is of another boot or version, or cannot be read."""
    try:
        saved = _DECODER.decode(state)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return ()
    return saved.gpus if (saved.version, saved.boot_id) == (_VERSION, boot_id) else ()
