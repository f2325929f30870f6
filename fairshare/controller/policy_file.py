"""Reads the policy file, warns about settings that are allowed but rarely intended, and saves changes to the file or
its ConfigMap.

`accountant.wire.policy_models.Policy` defines the settings of a policy and checks its queue tree. This module adds
checks that apply only to a file, because policies that were stored earlier must stay readable.

A change never overwrites a concurrent one. A write states the version that it replaces, and is refused if that version
is no longer there."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Protocol

from accountant.wire.option_types import MOST
from accountant.wire.policy_models import Policy, QueuePolicy
from accountant.wire.scheduler_sections import Mode
from fairshare.core.gpu_models import policy_of_part
from fairshare.core.queues_and_weights import UNLIMITED, PolicyTree
from fairshare.core.scheduler_queue_objects import has_ref
from fairshare.laws.gang_turns import gang_reach
from fairshare.targets.guard import PluginFault
from fairshare.targets.installed import adapters, with_workloads
from fairshare.targets.weight_plan import Advice
from fairshare.usage.multi_cluster_windows import OtherClusters
from gputally.base import atomic_file
from gputally.base.errors import ClusterError, FairshareError
from gputally.base.near_names import nearest, shown
from gputally.base.yaml_file import Document, FileFault, Key, read
from gputally.kubernetes.objects import CONFIG_MAP, Object, Objects
from gputally.kubernetes.pod_queue_labels import ACCOUNTS
from gputally.kubernetes.scheduler_plugins import left_out
from gputally.server.config_loading import ReloadedFile, validate


class PolicyFault(FairshareError):
    """An option that does not match the policy, with the reason."""


def reloaded(path: Path, others: OtherClusters) -> ReloadedFile[Policy]:
    """Return a policy file that may change while the controller runs. Raises FileFault for a faulty file.

    others: the clusters that the policy may count."""
    return ReloadedFile(path, lambda path: load(path, others)[0])


def load(path: Path, others: OtherClusters | None = None) -> tuple[Policy, Document]:
    """Return the policy and the document it was read from. others: the clusters that it may count; None: not checked.
    Raises FileFault, one line per fault."""
    document = read(path)
    policy = policy_of_document(document)
    if others is not None:
        others.check(policy, document)
    return policy, document


def policy_of_document(document: Document) -> Policy:
    """Return the policy in a document. Raises FileFault, with one line per fault."""
    if document.data is None:
        raise FileFault([f"{document.place(())}: the file is empty"])
    policy = validate(document, Policy)
    faults = [
        f"{document.place(path)}: {'.'.join(map(str, path))}: {reason}" for path, reason in faults_beyond_model(policy)
    ]
    if faults:  # not checked in the model, because policies stored earlier must stay readable
        raise FileFault(faults)
    return policy


def faults_beyond_model(policy: Policy) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Yield (path, reason) of every fault of a policy that its models accept."""
    for at, queue in enumerate(policy.queues):
        for key, value in (("deserved", queue.deserved), ("limit", queue.limit)):
            if UNLIMITED < value < 0:
                yield ("queues", at, key), f"{value:g} {_NO_QUOTA}"
        for model, own in queue.gpu_models.items():
            for key, value in (("deserved", own.deserved), ("limit", own.limit)):
                if UNLIMITED < value < 0:
                    yield ("queues", at, "gpu_models", model, key), f"{value:g} {_NO_QUOTA}"
        if not queue.name.isprintable() or queue.name != queue.name.strip():
            yield ("queues", at, "name"), f"{queue.name!r} has invisible characters"
    yield from _scheduler_faults(policy)


_NO_QUOTA = "is neither -1 (unlimited) nor 0 or more"


def _scheduler_faults(policy: Policy) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Yield the faults in the sections of schedulers of other packages."""
    sections = {adapter.section: adapter for adapter in adapters()}
    for name, section in policy.targets.others.items():
        try:
            faults = sections[name].faults(section) if name in sections else (((), ""),)
        except PluginFault:  # it is no fault of the policy: it is advice, and its target is degraded
            continue
        for path, reason in faults:
            yield (
                ("targets", name, *path),
                reason or f"no scheduler of this name is installed{nearest(name, sections)}",
            )
    stopped = [
        name for name, adapter in sections.items() if adapter.name in with_workloads() or adapter.name in left_out()
    ]
    for name in policy.preemption.targets.others:
        if name not in stopped:
            yield (
                ("preemption", "targets", name),
                f"no scheduler of this name is installed whose workloads can be preempted{nearest(name, stopped)}",
            )


def gangs(policy: Policy, texts: Sequence[str]) -> dict[str, float]:
    """Parse the largest gang of each queue from texts such as `QUEUE=GPUS`. Raises PolicyFault."""
    names = {queue.name for queue in policy.queues}
    sizes: dict[str, float] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        if name not in names or not size.isascii() or not size.isdigit() or not 0 < int(size) <= MOST:
            raise PolicyFault(f"--gang {text}: write QUEUE=GPUS, a queue of the policy and a whole number of GPUs")
        sizes[name] = float(size)
    return sizes


def advice(
    policy: Policy, capacity: float | None = None, largest: Mapping[str, float] | None = None
) -> tuple[Advice, ...]:
    """Return warnings about settings that are allowed and rarely intended.

    capacity: GPUs of the cluster, if known.
    largest: the largest gang of some queues. With the capacity known, a gang that can never be admitted is a
        warning."""
    children = PolicyTree(policy).children
    warnings = [*_history_advice(policy), *_scheduler_advice(policy)]
    deserved = _deserved(children.get(None, ()))
    if capacity is not None and deserved > capacity:
        text = f"deserved quotas add up to {deserved:g} GPUs, and the cluster has {capacity:g}"
        warnings.append(Advice(("queues",), text))
    warnings += _budget_advice(policy)
    for at, queue in enumerate(policy.queues):
        of_queue = [*_queue_advice(queue, children.get(queue.name, ()))]
        if capacity is not None and largest is not None and queue.name in largest:
            reach = gang_reach(policy, capacity, queue.name, largest[queue.name])
            if not reach.admitted:
                of_queue.append((("name",), reach.sentence()))
        warnings += [Advice(("queues", at, *path), text) for path, text in of_queue]
    return (*warnings, *_model_advice(policy))


def _model_advice(policy: Policy) -> Iterator[Advice]:
    """Yield the warnings about the figures of each GPU model."""
    for model in policy.gpu_models:
        of_model = policy_of_part(policy, model)
        children = PolicyTree(of_model).children
        for at, queue in enumerate(of_model.queues):
            if model not in policy.queues[at].gpu_models:
                continue
            above, deserved, limit = _deserved(children.get(queue.name, ())), queue.deserved, queue.limit
            place = ("queues", at, "gpu_models", model)
            if deserved != UNLIMITED and above > deserved:
                text = f"the children of {queue.name!r} deserve {above:g} {model} GPUs together, and it {deserved:g}"
                yield Advice(place, text)
            if limit != UNLIMITED and deserved > limit:
                text = f"{queue.name!r} deserves {deserved:g} {model} GPUs, which is above its limit of {limit:g}"
                yield Advice(place, text)


def _history_advice(policy: Policy) -> Iterator[Advice]:
    if policy.measure == "busy":
        yield Advice(("measure",), "`busy` makes hoarding free: a held but idle GPU counts as no usage")
    if policy.measure == "cost":
        yield Advice(("measure",), "`cost` freezes all weights while any GPU time in the window has no price")
    if policy.k == 0:
        yield Advice(("k",), "`k: 0` switches history off: weights stay as configured")


def _scheduler_advice(policy: Policy) -> Iterator[Advice]:
    """Yield what the schedulers of the policy advise."""
    for adapter in adapters():
        section = policy.targets.others.get(adapter.section)
        try:
            if section is not None:
                adapter.faults(section)  # those of the policy were reported when it was read
            if section is not None or has_ref(policy, *adapter.prefixes):
                yield from adapter.advise(policy)
        except PluginFault as fault:
            yield Advice(("targets", adapter.section), str(fault))


def _budget_advice(policy: Policy) -> Iterator[Advice]:
    deserved = {queue.name: queue.deserved for queue in policy.queues}
    teams = {queue.team for queue in policy.queues if queue.team}
    for at, budget in enumerate(policy.budgets):
        if teams and budget.team is not None and budget.team not in teams:
            text = (
                f"no queue has the team {shown(budget.team)}: unless namespaces name it, the budget counts nothing"
                f"{nearest(budget.team, teams)}"
            )
            yield Advice(("budgets", at, "team"), text)
        if budget.exhausted == "no-over-quota" and budget.queue is not None and deserved.get(budget.queue) == 0:
            text = f"{budget.queue!r} deserves nothing: once the budget is used up it gets no GPU at all"
            yield Advice(("budgets", at, "exhausted"), text)


def _queue_advice(queue: QueuePolicy, children: Sequence[QueuePolicy]) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Yield the warnings about a queue, each with the path of the setting inside the queue."""
    of_children, deserved = _deserved(children), queue.deserved
    if deserved != UNLIMITED and of_children > deserved:
        yield (
            ("deserved",),
            f"the children of {queue.name!r} deserve {of_children:g} GPUs together, and it deserves {deserved:g}",
        )
    if queue.limit != UNLIMITED and deserved > queue.limit:
        yield ("deserved",), f"{queue.name!r} deserves {deserved:g} GPUs, which is above its limit of {queue.limit:g}"
    if queue.limit == 0:
        yield ("limit",), f"{queue.name!r} starves: its limit is 0, so it never gets a GPU"
    elif deserved == 0 and queue.weight == 0:
        yield (
            ("weight",),
            f"{queue.name!r} starves: it deserves no GPU, and with weight 0 it gets no part of the others",
        )
    if not queue.refs and not children:
        yield ("name",), f"no scheduler's queue belongs to {queue.name!r}: it has no refs"
    for number, ref in enumerate(queue.refs):
        scheduler, _, name = ref.partition(":")
        if not name or (scheduler != ACCOUNTS and not any(scheduler in each.prefixes for each in adapters())):
            example = next((f" (write for example {each.prefixes[0]}:{queue.name})" for each in adapters()), "")
            yield ("refs", number), f"{ref!r} names no known scheduler{example}"


def show(document: Document, warnings: tuple[Advice, ...]) -> list[str]:
    """Format each warning as `file:line: warning: …`."""
    return [f"{document.place(warning.path)}: warning: {warning.message}" for warning in warnings]


def in_dry_run(policy: Policy) -> Policy:
    """Return the policy with every target and every preemption rule in dry-run, unless it is off."""

    def dry(mode: Mode | None) -> Mode | None:
        return "dry-run" if mode == "enforce" else mode

    targets = policy.targets
    applies = {
        name: target.model_copy(update={"apply": "dry-run"})
        for name in (*type(targets).model_fields, *targets.others)
        if hasattr(target := targets.of(name), "apply")
    }
    rules = policy.preemption
    modes = {name: dry(rules.targets.of(name)) for name in (*type(rules.targets).model_fields, *rules.targets.others)}
    idle = rules.idle.model_copy(update={"mode": dry(rules.idle.mode)}) if rules.idle is not None else None
    preemption = rules.model_copy(
        update={"mode": dry(rules.mode), "targets": rules.targets.model_copy(update=modes), "idle": idle}
    )
    return policy.model_copy(update={"targets": targets.model_copy(update=applies), "preemption": preemption})


def _deserved(queues: Sequence[QueuePolicy]) -> float:
    return fsum(queue.deserved for queue in queues if queue.deserved != UNLIMITED)


FIELD_MANAGER = "gputally-pages"
KEY = "policy.yaml"
"""Key in the ConfigMap."""


class PolicyNotWritten(FairshareError):
    """The policy could not be read for the form, or not be written. The message gives the reason."""


class PolicyFileChanged(PolicyNotWritten):
    """The file has changed since the form was opened."""


def digest(text: str) -> str:
    """Return the digest by which a form detects a changed file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PolicyWriter(Protocol):
    """A way to write the policy.

    when: a phrase for people that says when the controller will have read a saved policy."""

    when: str

    def write(self, text: str, before: str) -> None:
        """Replace the policy at once, or not at all.

        before: the digest of the text that is to be replaced. Raises PolicyNotWritten."""
        ...


class PolicyLocation:
    """The file that the controller reads, and the way in which the pages write it, if they may."""

    def __init__(self, path: Path, writer: PolicyWriter | None = None) -> None:
        """writer: None if the pages cannot write the policy."""
        self._path = path
        self._writer = writer
        self._lock = threading.Lock()

    @property
    def writable(self) -> bool:
        return self._writer is not None

    @property
    def when(self) -> str:
        return self._writer.when if self._writer is not None else ""

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def path(self) -> str:
        return str(self._path)

    def read(self) -> str:
        """Return the text of the file. Raises PolicyNotWritten."""
        return _read(self._path)

    def write(self, text: str, before: str) -> None:
        """Save the policy, one save at a time. before: as for `PolicyWriter`. Raises PolicyNotWritten."""
        if self._writer is None:
            raise PolicyNotWritten("the pages may not write the policy (setting pages_apply): change its file instead")
        with self._lock:
            self._writer.write(text, before)


class PolicyFileWriter:
    """Writes the file itself, atomically and with its present permissions."""

    when = "before its next cycle"

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str, before: str) -> None:
        if digest(_read(self._path)) != before:
            raise PolicyFileChanged(f"{self._path} has changed since the form was opened: open it again")
        try:
            # For a symbolic link, its target is replaced.
            atomic_file.write(self._path.resolve(), text.encode())
        except OSError as error:
            raise PolicyNotWritten(f"{self._path}: {error.strerror or error}") from error


class PolicyConfigMapWriter:
    """Writes the ConfigMap from which the file is mounted.

    It first takes over the field, because a person requested the change, and then writes it. Both steps name the
    version that was read, so a concurrent write is a conflict."""

    when = "as soon as the kubelet has brought it, about a minute"

    def __init__(self, cluster: Objects, namespace: str, name: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name

    def write(self, text: str, before: str) -> None:
        try:
            config_map = self._cluster.get(CONFIG_MAP, self._name, self._namespace)
            current = (config_map.get("data") or {}).get(KEY)
            if not isinstance(current, str) or digest(current) != before:
                place = f"ConfigMap {self._namespace}/{self._name}"
                raise PolicyFileChanged(
                    f"{place}: its {KEY} differs from the text in the form: open the form again in a minute"
                )
            unchanged = self._object(current, config_map["metadata"]["resourceVersion"])
            owned = self._cluster.transfer(unchanged, field_manager=FIELD_MANAGER)
            changed = self._object(text, owned["metadata"]["resourceVersion"])
            self._cluster.apply(changed, field_manager=FIELD_MANAGER)
        except ClusterError as error:
            raise PolicyNotWritten(str(error)) from error

    def _object(self, text: str, version: str) -> Object:
        return {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": {"name": self._name, "namespace": self._namespace, "resourceVersion": version},
            "data": {KEY: text},
        }


def policy_writer(setting: str, path: Path, cluster: Objects) -> PolicyWriter | None:
    """Return the writer that the setting `pages_apply` names; None if it is empty."""
    if setting == "file":
        return PolicyFileWriter(path)
    if setting:
        namespace, _, name = setting.removeprefix("configmap:").partition("/")
        return PolicyConfigMapWriter(cluster, namespace, name)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyNotWritten(f"{path}: {getattr(error, 'strerror', None) or error}") from error
