"""Defines the usage batch (version 1) that the agent sends to the accountant and its answer, and exports the JSON
Schema.

All numbers are integers. Times are UTC milliseconds, and spans are half-open [start, end). Every row has a sequence
number of its outbox. Intervals and facts share one sequence.

Fields may be added with a default. No field is renamed, removed or given another type. Either side may therefore be one
release newer, and every earlier payload stays readable.

Unknown is not zero: a value that could not be read is None, with the reason in `gaps`.

Records hold no references back to their containers, so the garbage collector need not track them (`gc=False`). This
matters because the accountant receives tens of thousands at once.

`python -m agent.wire > docs/schema/usage-batch.v1.json` writes the schema again. A test compares the file with it."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Final, Literal

import msgspec

from gputally.base.pod_stop import PodStop
from gputally.base.untrusted_text import BootId, Epoch, Name

SCHEMA = 1
"""Version of this format; the accountant refuses a Batch with a schema it does not know."""

HolderKind = Literal["pod", "slurm", "container", "process", "unattributed"]
JOB: Final = "slurm"
"""The kind of a job of a batch system, whichever it is."""
SharingMode = Literal["time-slicing", "mps", "fraction", "dra", "processes"]
Health = Literal["ok", "lost"]
Method = Literal["device", "process", "accounting", "gpm", "dcgm", "allocation", "carried", "imported", "simulated"]


LabelKey = Annotated[str, msgspec.Meta(max_length=512)]
LabelValue = Annotated[str, msgspec.Meta(max_length=4_096)]
Labels = Annotated[dict[LabelKey, LabelValue], msgspec.Meta(max_length=256)]
"""These limits are wider than those of Kubernetes for one name, one value and the labels of one pod."""
GapReason = Annotated[str, msgspec.Meta(max_length=4_096)]
ShortText = Annotated[str, msgspec.Meta(max_length=4_096)]
"""A text that the accountant cuts and makes printable, so that no text of a report refuses a batch."""


class Slice(msgspec.Struct, frozen=True, omit_defaults=False, gc=False):
    """A MIG instance. It has `compute` of the GPU's `compute_of` compute slices, and `memory_mib` of the GPU's
    `memory_of_mib` (0 if the driver does not report the GPU's memory)."""

    profile: str
    gi: int
    ci: int
    compute: int
    compute_of: int
    memory_mib: int
    memory_of_mib: int


class Holder(msgspec.Struct, frozen=True, gc=False):
    """The holder of a device. The kind `unattributed` means busy time whose owner is unknown."""

    kind: HolderKind
    uid: str
    namespace: str = ""
    name: str = ""
    container: str = ""


UNATTRIBUTED = Holder(kind="unattributed", uid="")


class Sharing(msgspec.Struct, frozen=True, gc=False):
    """How several holders share a device (or a MIG instance).

    replicas: the number of equal parts into which the device is divided; 0 if the mode has no such parts."""

    mode: SharingMode
    replicas: int = 0


class Gap(msgspec.Struct, frozen=True, gc=False):
    """A part of the interval for which nothing could be read."""

    start_ms: int
    end_ms: int
    reason: GapReason


class UsageInterval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row: the part of one GPU that one holder has over a closed span, or the part that nothing holds.

    slice: the MIG instance; None for the whole GPU.
    holder: None for the part that nothing holds.
    capacity_us: GPU-microseconds of the part. The rows of one GPU with the same span are a *set*, whose capacities add
        up to (end_ms - start_ms) * 1000. They add up to less only if a part could not be continued over a restart, or
        if it is unknown whether a part is held. 0 for `unattributed`.
    allocated_us: capacity_us if the part is held, else 0.
    busy_us, sm_active_us, tensor_active_us: time of the whole GPU (for a MIG instance, its own activity times compute /
        compute_of); None if unknown. A holder can be busy for longer than its capacity.
    memory_mib_s: device memory that the holder used, in MiB times seconds; None if unknown.
    energy_uj: energy of the row in microjoules; None if unknown.
    method: how the busy time was measured.
    gaps: the parts of the span in which nothing could be read."""

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
    """An owner of a pod, such as a Job. The owners of a pod are listed from the nearest to the outermost."""

    kind: str
    name: str
    uid: str = ""


class PodFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node knows about a pod that holds or requests a GPU. Of several facts about a pod, those with the newest
    `observed_ms` count.

    workload: `Kind/name` of the outermost owner; "" if none is known.
    queue_ref: the queue, `SCHEDULER:NAME` as in the `refs` of a policy, or `policy:NAME`; "" if none is known.
    requests: quantity of each resource, as written in the pod.
    stop: by whom and why it was stopped, as its status says; None if it says nothing of it."""

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
    stop: PodStop | None = None


class Skipped(msgspec.Struct, frozen=True, gc=False):
    """A sequence number that the agent will never send. The time of its record stays unmetered."""

    seq: int
    reason: str


class GpuError(msgspec.Struct, frozen=True, gc=False):
    """The errors of one kind of a GPU.

    kind: `xid 79`, `ecc uncorrected`, `hardware thermal slowdown`, …
    count: how many there were since `since_ms`; None: since the driver was loaded.
    last_ms: when the newest one was; None if unknown."""

    kind: ShortText
    count: int
    since_ms: int | None = None
    last_ms: int | None = None


class GpuReport(msgspec.Struct, frozen=True):
    """What an agent knows of the errors of a GPU. A kind that is neither in `errors` nor in `unread` did not occur.

    needs: actions that faults require, each `ACTION: CAUSE` with restart_app, reset_gpu or drain_node.
    unread: by kind of errors (`xid` for all of that name), why the agent cannot know of them."""

    gpu_uuid: ShortText
    errors: Annotated[tuple[GpuError, ...], msgspec.Meta(max_length=1_000)] = ()
    needs: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=1_000)] = ()
    unread: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=1_000)] = {}


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of itself and of its GPUs, beside its records. The newest report of a node counts.

    version: the agent's release, such as `0.1.0`; "" if it does not say.
    gpus: None if the agent does not report errors of GPUs."""

    version: ShortText = ""
    gpus: Annotated[tuple[GpuReport, ...], msgspec.Meta(max_length=1_000)] | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/usage. The sequence numbers of its intervals, facts and skipped numbers run from `first_seq`
    without a hole. A set (the rows of one GPU with the same span) is never split over two batches. A batch without
    records asks for the newest Ack; its `first_seq` is the number after the newest durable one.

    boot_id: id of the node's boot; "" if the node does not report it.
    epoch: id of the outbox, a UUIDv7, so that epochs sort by creation.
    oldest_seq: the oldest number that the outbox still contains.
    sent_ms: time of the node's clock when the batch is sent; None if the node does not report it.
    agent: None if the agent says nothing of itself."""

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
    agent: AgentReport | None = None


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """The accountant's answer to a batch: up to which sequence number it has stored the records of an epoch.

    durable_seq: committed to the ledger.
    checkpointed_seq: in the checkpointed database file.
    archived_seq: in the archive outside the accountant's volume; None if there is no archive.
    clock_ms: the accountant's time; None if it distrusts its clock or does not report it."""

    epoch: str
    durable_seq: int
    checkpointed_seq: int
    archived_seq: int | None = None
    clock_ms: int | None = None


PROBLEM = "https://gputally.dev/problems/"
"""Prefix of the `type` of every problem+json answer of the accountant (RFC 9457). A 4xx answer with another `type`
comes from something in between (a proxy); it is retried and has no other effect."""


def schemas_of(*types: type, ref_template: str = "#/$defs/{name}") -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return the JSON Schemas of types, and those that they refer to by name. Their descriptions are docstrings without
    indentation, in which versions of Python differ."""
    from inspect import cleandoc

    found, parts = msgspec.json.schema_components(types, ref_template=ref_template)
    for part in parts.values():
        if "description" in part:
            part["description"] = cleandoc(part["description"])
    return found, parts


def usage_batch() -> str:
    """Return the JSON Schema of `Batch` as indented JSON with a final newline."""
    (batch,), parts = schemas_of(Batch)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://gputally.dev/schema/usage-batch.v{SCHEMA}.json",
        "title": f"gputally usage batch, version {SCHEMA}",
        **batch,
        "$defs": parts,
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(usage_batch())
