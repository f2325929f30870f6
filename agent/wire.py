"""Defines the usage batch that the agent sends to the accountant (version 1), and exports its JSON Schema.

All numbers are integers. Times are UTC milliseconds, and spans are half-open [start, end). Every row has a sequence
number of its outbox. Intervals and facts share one sequence.

Fields may be added with a default. None is renamed, removed or given another type. Either side may therefore be one
release newer, and every earlier payload stays readable.

Unknown is not zero: a value that could not be read is None, with the reason in `gaps`.

Records hold no references back to their containers, so the garbage collector need not track them (`gc=False`). This
matters because the accountant receives tens of thousands at once.

`python -m agent.wire > docs/schema/usage-batch.v1.json` writes the schema again. A test compares the file with it."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import msgspec

from gputally.base.untrusted_text import BootId, Epoch, Name

SCHEMA = 1
"""Version of this format; the accountant refuses a Batch with a schema it does not know."""

HolderKind = Literal["pod", "slurm", "container", "process", "unattributed"]
SharingMode = Literal["time-slicing", "mps", "fraction", "dra", "processes"]
Health = Literal["ok", "lost"]
Method = Literal["device", "process", "accounting", "gpm", "dcgm", "allocation", "carried", "imported", "simulated"]


LabelKey = Annotated[str, msgspec.Meta(max_length=512)]
LabelValue = Annotated[str, msgspec.Meta(max_length=4_096)]
Labels = Annotated[dict[LabelKey, LabelValue], msgspec.Meta(max_length=256)]
"""These limits are wider than those of Kubernetes for one name, one value and the labels of one pod."""
GapReason = Annotated[str, msgspec.Meta(max_length=4_096)]


class Slice(msgspec.Struct, frozen=True, omit_defaults=False, gc=False):
    """A MIG instance: `compute` of `compute_of` slices, `memory_mib` of the device's memory `memory_of_mib` (0: the
    driver does not report it)."""

    profile: str
    gi: int
    ci: int
    compute: int
    compute_of: int
    memory_mib: int
    memory_of_mib: int


class Holder(msgspec.Struct, frozen=True, gc=False):
    """The holder of the device. `unattributed` means busy time without a known owner."""

    kind: HolderKind
    uid: str
    namespace: str = ""
    name: str = ""
    container: str = ""


UNATTRIBUTED = Holder(kind="unattributed", uid="")


class Sharing(msgspec.Struct, frozen=True, gc=False):
    """How several holders share the device (or the MIG instance). `replicas` is the number of equal parts it is divided
    into, of which this row has some; 0 if the mode has no such number."""

    mode: SharingMode
    replicas: int = 0


class Gap(msgspec.Struct, frozen=True, gc=False):
    """A part of the interval for which nothing could be read."""

    start_ms: int
    end_ms: int
    reason: GapReason


class UsageInterval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row: one holder's part (or the unheld rest) of one GPU over a closed span.

    capacity_us:   GPU-microseconds of the device in this row. Over the rows of one GPU with equal [start_ms, end_ms) (a
                   *set*) they add up to (end_ms - start_ms) * 1000. They add up to less only if a part could not be
                   continued over a restart, or if it is unknown whether a part is held. 0 for `unattributed`.
    allocated_us:  capacity_us if the part is held, 0 in the unheld row.
    busy_us, sm_active_us, tensor_active_us: time of the physical GPU (the activity of a MIG instance times compute /
                   compute_of); None if unknown. A slice may be busier than allocated.
    memory_mib_s:  device memory held by this holder, MiB·s; None if unknown.
    energy_uj:     microjoules attributed to this row; None if unknown."""

    seq: int
    start_ms: int
    end_ms: int
    gpu_uuid: str
    gpu_model: str
    slice: Slice | None = None
    holder: Holder | None = None
    sharing: Sharing | None = None
    health: Health = "ok"
    capacity_us: int
    allocated_us: int
    busy_us: int | None = None
    sm_active_us: int | None = None
    tensor_active_us: int | None = None
    memory_mib_s: int | None = None
    energy_uj: int | None = None
    method: Method
    gaps: Annotated[tuple[Gap, ...], msgspec.Meta(max_length=10_000)] = ()


class Owner(msgspec.Struct, frozen=True, gc=False):
    """One step of the controller chain, nearest first."""

    kind: str
    name: str
    uid: str = ""


class PodFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the node about a pod that holds a GPU; those with the newest `observed_ms` count.

    queue_ref: `kai:NAME`, `kueue:NAMESPACE/NAME`, `volcano:NAME`, `slurm:ACCOUNT` or `policy:NAME`; "" if none is
        known.
    workload: `Kind/name` of the outermost owner.
    requests: resource name to quantity as written in the pod."""

    seq: int
    uid: str
    namespace: str
    name: str
    node: str
    labels: Labels = {}
    owners: Annotated[tuple[Owner, ...], msgspec.Meta(max_length=64)] = ()
    workload: str = ""
    queue_ref: str = ""
    priority: int | None = None
    requests: Labels = {}
    created_ms: int | None = None
    scheduled_ms: int | None = None
    started_ms: int | None = None
    ended_ms: int | None = None
    observed_ms: int


class Skipped(msgspec.Struct, frozen=True, gc=False):
    """A sequence number that will never come, declared by the agent: its time stays unmetered."""

    seq: int
    reason: str


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The body of one POST /v1/usage. It covers the sequence numbers from `first_seq` on without a hole: each number is
    an interval, a fact or a skipped one. `oldest_seq` is the oldest number that the outbox still has. A set (the rows
    of one GPU with equal span) is never split over two batches.

    epoch: id of the outbox (UUIDv7 text, so that it sorts by creation).
    boot_id: the boot id of the node.
    sent_ms: time of the node's clock when the batch is sent; None if the node does not report it."""

    schema: int = SCHEMA
    cluster: Name
    node: Name
    boot_id: BootId
    epoch: Epoch
    first_seq: int
    oldest_seq: int
    intervals: tuple[UsageInterval, ...] = ()
    facts: tuple[PodFacts, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    sent_ms: int | None = None


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """The highest contiguous sequence numbers that are committed (`durable_seq`), in the checkpointed database file,
    and in the archive outside the accountant's volume (None: no archive configured). clock_ms: the accountant's time;
    None if it doubts its clock or does not report it."""

    epoch: str
    durable_seq: int
    checkpointed_seq: int
    archived_seq: int | None = None
    clock_ms: int | None = None


PROBLEM = "https://gputally.dev/problems/"
"""Prefix of the `type` of every problem+json answer of the accountant (RFC 9457). A 4xx answer with another `type`
comes from something in between (a proxy); it is retried and has no other effect."""


def usage_batch() -> str:
    """Return the schema of POST /v1/usage as indented JSON with a final newline; the same text every time."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://gputally.dev/schema/usage-batch.v{SCHEMA}.json",
        "title": f"gputally usage batch, version {SCHEMA}",
        **msgspec.json.schema(Batch),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(usage_batch())
