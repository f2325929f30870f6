"""Converts the policy file to form fields and back, and keeps the file's comments and layout.

A field that the user did not change changes nothing in the file. Faults and advice are those of `fairshare check`; this
module finds the form's field of each.

ruamel.yaml edits the values. From its output the module takes only the lines that the edit affects, and keeps every
other line of the file. The result must parse to the requested data. If it does not (because of anchors, merge keys or a
list on one line), the module writes the file from the data, below the file's first comments."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import SequenceMatcher, unified_diff
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent

from accountant.wire import window_decays
from accountant.wire.policy_models import Policy
from fairshare.controller import policy_file as policies
from fairshare.controller.policy_difference import text_of
from fairshare.targets.installed import adapters
from fairshare.web.form_fields import Field, FieldGroup, targets
from gputally.base.yaml_file import FileFault, Key, Plain, parse
from gputally.kubernetes.scheduler_plugins import own_schedulers
from gputally.server.config_loading import faults_of

Path = tuple[Key, ...]
LISTED = "queues"
"""The key of the list whose entries the form can add and remove."""
_LONGEST_LINE = 1_000_000
_NESTED = re.compile(r"^( +)[^ -]", re.MULTILINE)
"""Matches the first indented key of a file."""


@dataclass(frozen=True, slots=True)
class ChangedQueue:
    """One queue of the file after the change.

    at: its position in the file before the change; None for a new queue.
    values: the changed values by key; None removes the key."""

    at: int | None
    values: Mapping[str, Plain]


@dataclass(frozen=True, slots=True)
class Revision:
    """The changes that a submitted form makes to the policy file.

    values: the changed values outside of the queues, by path; None removes the key.
    entries: all queues after the change, in order."""

    values: Mapping[Path, Plain]
    entries: tuple[ChangedQueue, ...]


def revised(data: Mapping[str, Any], revision: Revision) -> dict[str, Any]:
    """Return the file's data after the revision."""
    wanted: dict[str, Any] = deepcopy(dict(data))
    for path, value in revision.values.items():
        _put(wanted, path, value)
    before = _entries(data)
    entries = []
    for entry in revision.entries:
        after = deepcopy(before[entry.at]) if entry.at is not None else {}
        for key, value in entry.values.items():
            _put(after, (key,), value)
        entries.append(after)
    wanted[LISTED] = entries
    return wanted


def revise(text: str, revision: Revision) -> tuple[str, bool]:
    """Return the file's text after the revision, and True if the old text could be edited; False if the text had to be
    written from the data, which loses comments."""
    data = parse(text, "policy").data
    wanted = revised(data if isinstance(data, dict) else {}, revision)
    if wanted == data:
        return text, True
    try:
        edited = _edited(text, revision)
        if parse(edited, "policy").data == wanted:
            return edited, True
    except (YAMLError, FileFault, LookupError, TypeError, ValueError, AttributeError):
        pass  # the structure of the file cannot be edited in place
    return policy_text(wanted, _heading(text)), False


def policy_text(data: Mapping[str, Any], heading: str = "") -> str:
    """Return the data as the text of a policy file, one queue per line. heading: the lines before the data."""
    parts = [heading] if heading else []
    for key, value in data.items():
        if key == LISTED and value:
            parts.append(f"{LISTED}:\n" + "".join(f"  - {flow(entry)}\n" for entry in value))
        else:
            parts.append(yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True))
    return "".join(parts)


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return str(dumped).removesuffix("\n...\n").rstrip("\n")


def _put(data: Any, path: Path, value: Any) -> None:
    *above, last = path
    for key in above:
        if not isinstance(data.get(key), dict):
            data[str(key)] = {}
        data = data[key]
    if value is None:
        data.pop(str(last), None)
    else:
        data[str(last)] = value


def _entries(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the queues of the data. An entry of a faulty file that is no mapping is returned as an empty one."""
    entries = data.get(LISTED)
    return [each if isinstance(each, dict) else {} for each in entries] if isinstance(entries, list) else []


def _heading(text: str) -> str:
    """Return the comments at the beginning of a file."""
    lines = []
    for line in text.splitlines(keepends=True):
        if not line.startswith("#") and line.strip():
            break
        lines.append(line)
    return "".join(lines)


def _edited(text: str, revision: Revision) -> str:
    """Return the file's text with the changes of the revision.

    ruamel.yaml gets the text without blank lines and lines that are only comments. `_merged` puts these lines back."""
    lines = [f"{line}\n" for line in text.splitlines()]
    bare = "".join(line for line in lines if _has_content(line))
    _, indent, offset = load_yaml_guess_indent(bare)
    editor = YAML()
    editor.preserve_quotes = True
    editor.width = _LONGEST_LINE
    nested = _NESTED.search(bare)
    editor.indent(mapping=len(nested[1]) if nested else 2, sequence=indent or 2, offset=offset or 0)
    tree = editor.load(bare)
    before = _dumped(editor, tree)
    _change(editor, tree, revision)
    return _merged(lines, before, _dumped(editor, tree))


def _change(editor: YAML, tree: Any, revision: Revision) -> None:
    for path, value in revision.values.items():
        new = path[0] not in tree
        _put(tree, path, _styled(editor, value))
        if new and len(path) > 1 and value is not None:
            tree.yaml_set_comment_before_after_key(path[0], before="\n")
    listed = tree[LISTED]
    before = list(listed)
    remaining = {entry.at for entry in revision.entries}
    for at in reversed(range(len(before))):
        if at not in remaining:
            del listed[at]
    for entry in revision.entries:
        if entry.at is None:
            listed.append(editor.load(flow({key: value for key, value in entry.values.items() if value is not None})))
        else:
            for key, value in entry.values.items():
                _put(before[entry.at], (key,), _styled(editor, value))


def _styled(editor: YAML, value: Plain) -> Any:
    """Return a value that ruamel.yaml writes with each key of a mapping, and each mapping of a list, on a line of its
    own, and every other value on one line."""
    if isinstance(value, dict) and value:
        return {key: _styled(editor, each) for key, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return [editor.load(flow(each)) for each in value]
    return None if value is None else editor.load(flow(value))


def _dumped(editor: YAML, tree: Any) -> list[str]:
    stream = io.StringIO()
    editor.dump(tree, stream)
    return stream.getvalue().splitlines(keepends=True)


def _merged(lines: Sequence[str], before: Sequence[str], after: Sequence[str]) -> str:
    """Apply the differences between `before` and `after` to the lines of a file, and return the new text.

    before, after: the file before and after the change as ruamel.yaml formats it, without blank lines and lines
        that are only comments."""
    content = [number for number, line in enumerate(lines) if _has_content(line)]
    first: list[int] = []
    """For each line of `before`, the index of the first of the file's lines that it represents."""
    for _, start, end, at, last in SequenceMatcher(None, before, [lines[n] for n in content], False).get_opcodes():
        first += [min(at + number, last) for number in range(end - start)]
    ends = [0, *(content[number - 1] + 1 if number else 0 for number in [*first[1:], len(content)])]
    merged: list[str] = []
    done = 0
    for start, end, at, last in _line_changes(before, after):
        if start < end:
            first_changed = content[first[start]]  # the comments above the changed lines
        else:
            first_changed = max(done, ends[start])
            while (
                first_changed < len(lines)
                and not _has_content(lines[first_changed])
                and _indent(lines[first_changed]) > _indent(after[at])
            ):
                first_changed += 1  # the comments at the end of the part before
        merged += [*lines[done:first_changed], *after[at:last]]
        done = max(first_changed, ends[end])
    return "".join([*merged, *lines[done:]])


def _line_changes(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ranges of lines (start, end in `before`, start, end in `after`) that differ.

    Lines that are replaced one by one, with the same key, are separate ranges."""
    for change, start, end, at, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if change == "replace":
            keys, new = ([line.partition(":")[0] for line in part] for part in (before[start:end], after[at:last]))
            for _, one, two, three, four in SequenceMatcher(None, keys, new, autojunk=False).get_opcodes():
                if two - one == four - three:
                    pairs = zip(range(start + one, start + two), range(at + three, at + four), strict=True)
                    yield from ((old, old + 1, here, here + 1) for old, here in pairs)
                else:
                    yield start + one, start + two, at + three, at + four
        elif change != "equal":
            yield start, end, at, last


def _has_content(line: str) -> bool:
    return not line.lstrip().startswith("#") and bool(line.strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_WHOLE = re.compile(r"[+-]?\d+")
_MINUS = "\u2212"


def shown(each: Field, value: Any) -> str:
    """Return a value of the file as the text of its field in the form; "" for None, the value of a missing key."""
    if value is False and each.kind == "choice":
        return "off"  # YAML would read the text as a boolean
    if each.kind == "yaml" and value is not None:
        return _lines(value)
    return text_of(value)


def value(each: Field, text: str) -> Plain:
    """Return the value that the file gets for a field's text; None to remove the key.

    Invalid text is returned as text, which the validation of the policy then refuses."""
    if not text:
        return None
    if each.kind == "list":
        return [part for part in re.split(r"[\s,]+", text) if part]
    if each.kind in ("number", "duration"):
        plain = text.replace(_MINUS, "-")
        if _WHOLE.fullmatch(plain):
            return int(plain)
        return float(plain) if each.kind == "number" and _NUMBER.fullmatch(plain) else text
    if each.kind == "switch":
        return {"true": True, "false": False}.get(text, text)
    if each.kind == "yaml":
        try:
            return parse(text, each.label).data
        except FileFault:
            return text
    return text


def unreadable(each: Field, text: str) -> str:
    """Return the reason why the text of a `yaml` field is invalid, with the line in the field; "" if it is valid."""
    if each.kind != "yaml" or not text:
        return ""
    try:
        parse(text, "line")
    except FileFault as fault:
        return fault.faults[0]
    return ""


def look(data: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of the data; None if a key is missing."""
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _lines(value: Any) -> str:
    """Return a list or mapping as YAML with one entry per line."""
    if isinstance(value, list):
        return "\n".join(f"- {flow(entry)}" for entry in value)
    if isinstance(value, Mapping):
        return "\n".join(f"{flow(key)}: {flow(entry)}" for key, entry in value.items())
    return flow(value)


_STOPPED = next((one.section for one in own_schedulers() if one.workloads), "SCHEDULER")
_REFS = ", ".join(
    f"{one.name}:NAME" if one.pods.scheduler_names is not None else f"{one.name}:NAMESPACE/NAME"
    for one in [each for each in own_schedulers() if each.pods is not None][:2]
    if one.pods is not None
)
"""Examples, of the first schedulers."""
_MODES = (
    ("off", "off: no preemption"),
    ("dry-run", "dry-run: decided and recorded, no workload is stopped"),
    ("enforce", "enforce: workloads are stopped"),
)

BUDGETS = FieldGroup(
    "Budgets",
    "What a queue or a team may spend in a month, in money (with a currency) or in GPU-hours.",
    (
        Field(
            ("budgets",), "Budgets", "yaml",
            "one a line: - {name: vision-eur, team: vision, limit: 20000, currency: EUR, thresholds: [0.8, 1.0]}",
        ),
    ),
)  # fmt: skip

PREEMPTION = FieldGroup(
    "Preemption",
    "When running work is preempted, and how much of it at most.",
    (
        Field(("preemption", "mode"), "Preemption", "choice", "", _MODES),
        Field(("preemption", "quota"), "For quotas", "switch", "queues within their quota may take GPUs back"),
        Field(
            ("preemption", "over_share"), "For shares", "switch",
            "queues below their share may take GPUs back from queues above theirs",
        ),
        Field(
            ("preemption", "saturation"), "Saturation", "number",
            "held over due GPUs of the taking queue, times this, stays below that of the giving queue",
        ),
        Field(("preemption", "wait"), "Wait before", "duration", "how long a workload waits before it may preempt"),
        Field(("preemption", "min_runtime"), "Protected", "duration", "how long a workload is protected after a start"),
        Field(
            ("preemption", "cool_down"), "Cool-down", "duration",
            "how long a workload is protected after it was preempted",
        ),
        Field(("preemption", "per_team"), "Most per team", "number", "largest number of workloads stopped in an hour"),
        Field(("preemption", "per_cluster"), "Most in all", "number", "largest number of workloads stopped in an hour"),
        Field(("preemption", "lost_gpu_hours"), "Most work lost", "number", "GPU-hours of work lost in a day"),
        Field(("preemption", "targets"), "Per target", "yaml", f"{_STOPPED}: enforce  # the mode of one target"),
        Field(("preemption", "classes"), "Priority classes", "yaml", "- {name: urgent, value: 1000, preempts: true}"),
        Field(
            ("preemption", "slos"), "Latencies", "yaml",
            "- {name: chat, queue: inference, query: 'histogram_quantile(…)', above: 2s, sustained: 5m, gpus: 4}",
        ),
        Field(
            ("preemption", "idle"), "Idle GPUs", "yaml",
            "{mode: dry-run, below: 0.05, sustained: 2h, grace: 30m}; empty: idle reclaim is off",
        ),
    ),
    folded=True,
)  # fmt: skip

_KINDS = (
    ("sliding", "sliding: the last span, moving"),
    ("tumbling", "tumbling: since the last boundary"),
    ("cron", "cron: since a cron expression fired"),
    ("calendar", "calendar: this month"),
)
_MEASURES = (
    ("allocated", "allocated: GPU time held, idle or not"),
    ("busy", "busy: GPU time used"),
    ("cost", "cost: by the price book"),
    ("energy", "energy: joules"),
)
_TURNS = (
    ("gang", "gang: larger than any share"),
    ("burst", "burst: beside what it holds"),
)

_GROUPS = (
    FieldGroup(
        "History",
        "Which past usage counts, and how strongly.",
        (
            Field(("window", "kind"), "Window", "choice", "", _KINDS),
            Field(("window", "size"), "Length", "duration", "for example 7d, 12h, 1h30m"),
            Field(
                ("window", "half_life"), "Half-life", "duration",
                "age at which usage counts half; empty: 24h for a sliding window",
            ),
            Field(("window", "start"), "Boundaries from", "instant", "for a tumbling window: 2026-10-01T00:00:00Z"),
            Field(("window", "cron"), "Cron", "text", "for a cron window: minute hour day month weekday"),
            Field(("window", "decay"), "Decay", "choice", "", window_decays.CHOICES),
            Field(("window", "calc_period"), "Decay period", "duration", window_decays.FOR_PERIOD),
            Field(("window", "gpu_weights"), "Weights of models", "yaml", "H100: 2.5  # a GPU-second counts 2.5 times"),
            Field(("measure",), "Measure", "choice", "", _MEASURES),
            Field(
                ("usage", "clusters"), "Clusters", "list",
                "clusters whose usage counts together; empty: only this cluster",
            ),
            Field(("k",), "Weight of the past (k)", "number", "how strongly past use counts; 0: not at all"),
        ),
    ),
    FieldGroup(
        "Bounds",
        "How far and how fast a published weight may move from the configured one.",
        (
            Field(("bounds", "min_multiplier"), "At least", "number", "times the configured weight"),
            Field(("bounds", "max_multiplier"), "At most", "number", "times the configured weight"),
            Field(("bounds", "interval"), "Interval", "duration", "time for which weights stay after a change"),
            Field(("max_staleness",), "Staleness", "duration", "if the usage is older, the last weights stay"),
            Field(
                ("min_coverage",), "Coverage", "number",
                "if less of the capacity is metered (0 to 1), the last weights stay",
            ),
        ),
    ),
    FieldGroup(
        "Turns",
        "A gang that no weight admits gets the largest weight for a time.",
        (
            Field(("turns", "min_turn"), "Length", "duration", "time for which a turn lasts"),
            Field(("turns", "ratio"), "Weight", "number", "largest weight in a turn, as a ratio to the other queues'"),
            Field(("turns", "most_queues"), "Queues", "number", "turns only among at most so many siblings; 0: never"),
        ),
        folded=True,
    ),
    BUDGETS,
    PREEMPTION,
)  # fmt: skip

QUEUE = (
    Field(("name",), "Queue", "text"),
    Field(("parent",), "Under", "text", ""),
    Field(("deserved",), "Deserved", "number", "GPUs it can have at any time; −1: unlimited"),
    Field(("weight",), "Weight", "number", "its part of the remaining GPUs, before history"),
    Field(("limit",), "Limit", "number", "GPUs it may hold at most; −1: none"),
    Field(("gpu_models",), "By GPU model", "yaml", "H100: {deserved: 4, limit: 8}"),
    Field(("priority",), "Priority", "number", "higher is served first"),
    Field(("turn",), "Turns for", "choice", "", _TURNS),
    Field(("team",), "Team", "text", "the team that pays for its usage"),
    Field(("refs",), "Refs", "list", f"its queues at the schedulers: {_REFS} …"),
)  # fmt: skip


def groups() -> tuple[FieldGroup, ...]:
    """Return all fields outside of the queues. Those of the schedulers come from the models of their sections."""
    return (*_GROUPS, targets(adapters()))


def scalars() -> tuple[Field, ...]:
    return tuple(field for group in groups() for field in group.fields)


MOST_QUEUES = 2_000
"""The largest number of queues that a form may send."""


@dataclass(frozen=True, slots=True)
class FormRow:
    """One queue in the form.

    at: the queue's position in the file; None for a new queue.
    values: the texts of its fields, by the field's name.
    gone: True if the user removes the queue."""

    at: int | None
    values: Mapping[str, str]
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """The texts of all fields of the form.

    values: the texts of the fields outside of the queues, by the field's name.
    rows: the queues."""

    values: Mapping[str, str]
    rows: tuple[FormRow, ...]


@dataclass(frozen=True, slots=True)
class FormFinding:
    """A fault in a submitted form, or advice on it.

    field: the name of the field that the finding concerns, "" for no single field.
    place: file:line in the changed file.
    where: the path in the policy, "" for advice."""

    field: str
    place: str
    message: str
    where: str = ""

    @property
    def sentence(self) -> str:
        """Return the text that `fairshare check` prints after the place."""
        return f"{self.where}: {self.message}" if self.where else self.message

    @property
    def beside(self) -> str:
        """Return the text to show beside the field. For a value inside a `yaml` field the text begins with its path."""
        return self.sentence if self.where.startswith(f"{self.field}.") else self.message


@dataclass(frozen=True, slots=True)
class Draft:
    """The policy file with the changes of a form.

    edited: True if `text` is the file's own text with the changes; False if it was written from the data.
    policy: None if the file is invalid."""

    text: str
    edited: bool
    policy: Policy | None
    faults: tuple[FormFinding, ...] = ()
    advice: tuple[FormFinding, ...] = ()

    @property
    def sound(self) -> bool:
        return self.policy is not None


@dataclass(frozen=True, slots=True)
class PolicyText:
    """The text and the data of a policy file. name: the file's name, for messages."""

    text: str
    name: str
    data: dict[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def of(cls, text: str, name: str) -> PolicyText:
        """Parse the file. Raises FileFault for invalid YAML."""
        data = parse(text, name).data
        return cls(text, name, data if isinstance(data, dict) else {})

    @property
    def queues(self) -> list[dict[str, Any]]:
        return _entries(self.data)


def form_of(standing: PolicyText) -> Form:
    """Return the form with the file's values. A missing key is an empty field."""
    values = {each.name: shown(each, look(standing.data, each.path)) for each in scalars()}
    rows = tuple(
        FormRow(at, {each.name: shown(each, queue.get(each.name)) for each in QUEUE})
        for at, queue in enumerate(standing.queues)
    )
    return Form(values, rows)


def form_from(sent: Mapping[str, Sequence[str]]) -> Form:
    """Return the form that a browser sent: `window.size`, `queues.3.weight`, `queues.3.at`, `queues.3.gone`.

    Raises ValueError for content that these forms do not send."""
    values = {each.name: _sent(sent, each.name) for each in scalars()}
    numbers = sorted({int(parts[1]) for key in sent if (parts := key.split("."))[0] == LISTED and _indexed(parts)})
    if len(numbers) > MOST_QUEUES:
        raise ValueError(f"the form has more than {MOST_QUEUES} queues: edit the policy file instead")
    rows = []
    for number in numbers:
        head = f"{LISTED}.{number}."
        at = _sent(sent, head + "at")
        if at and not _WHOLE.fullmatch(at):
            raise ValueError(f"{head}at: {at[:40]!r} is not a number")
        rows.append(
            FormRow(
                int(at) if at else None,
                {each.name: _sent(sent, head + each.name) for each in QUEUE},
                bool(_sent(sent, head + "gone")),
            )
        )
    return Form(values, tuple(rows))


def with_new_row(form: Form) -> Form:
    """Return the form with an empty queue added at the end."""
    return Form(form.values, (*form.rows, FormRow(None, {each.name: "" for each in QUEUE})))


def draft(standing: PolicyText, form: Form, capacity: float | None = None) -> Draft:
    """Return the changed file with its faults and advice. Raises ValueError for queues that the file does not have.

    capacity: the GPUs of the cluster, to compare quotas with."""
    revision, numbers = _revision(standing, form)
    unread = {each.name: fault for each in scalars() if (fault := unreadable(each, form.values[each.name]))}
    unread |= {
        f"{LISTED}.{number}.{each.name}": fault
        for number, row in enumerate(form.rows)
        for each in QUEUE
        if (fault := unreadable(each, row.values[each.name]))
    }
    wanted = revised(standing.data, revision)
    text, edited = revise(standing.text, revision)
    document = parse(text, standing.name)
    found = faults_of(wanted, Policy)
    policy = None if found else Policy.model_validate(document.data)
    if policy is not None:
        found = tuple(policies.faults_beyond_model(policy))
    if policy is None or found:
        faults = tuple(
            FormFinding(name, document.place(path), unread.get(name, message), ".".join(map(str, path)))
            for path, message in found
            for name in [_field(path, numbers)]
        )
        return Draft(text, edited, None, faults)
    advice = tuple(
        FormFinding(_field(each.path, numbers), document.place(each.path), each.message)
        for each in policies.advice(policy, capacity)
    )
    return Draft(text, edited, policy, (), advice)


def difference(before: str, after: str, name: str) -> tuple[str, ...]:
    """Return the lines of a unified diff; none if the texts are equal."""
    return tuple(
        line.rstrip("\n")
        for line in unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), name, f"{name} (new)"
        )
    )


def names(form: Form) -> tuple[str, ...]:
    """Return the names of the queues in the form that the user does not remove. These can be parents."""
    return tuple(dict.fromkeys(row.values["name"] for row in form.rows if row.values["name"] and not row.gone))


def _revision(standing: PolicyText, form: Form) -> tuple[Revision, tuple[int, ...]]:
    """Return the changes of a form, and the position in the form of every queue that the file then has."""
    values: dict[tuple[Key, ...], Plain] = {}
    for each in scalars():
        text, was = form.values[each.name], look(standing.data, each.path)
        if text != shown(each, was):
            values[each.path] = value(each, text)
    entries, numbers = [], []
    for number, row in enumerate(form.rows):
        if row.gone or (row.at is None and not any(row.values.values())):
            continue
        if row.at is not None and not 0 <= row.at < len(standing.queues):
            raise ValueError(f"the file has no queue {row.at}: it has changed since the form was opened; open it again")
        base = standing.queues[row.at] if row.at is not None else {}
        changed = {
            each.name: value(each, row.values[each.name])
            for each in QUEUE
            if row.values[each.name] != shown(each, base.get(each.name))
        }
        entries.append(ChangedQueue(row.at, changed))
        numbers.append(number)
    return Revision(values, tuple(entries)), tuple(numbers)


def _field(path: Sequence[Key], numbers: Sequence[int]) -> str:
    """Return the name of the form's field for the path of a fault; "" if the form has no such field.

    numbers: the position in the form of each queue of the file."""
    keys = tuple(path)
    if len(keys) >= 2 and keys[0] == LISTED and isinstance(keys[1], int):
        key = keys[2] if len(keys) > 2 else "name"
        return f"{LISTED}.{numbers[keys[1]]}.{key}" if keys[1] < len(numbers) else ""
    known = {each.path for each in scalars()}
    return next((".".join(map(str, keys[:n])) for n in range(len(keys), 0, -1) if keys[:n] in known), "")


def _sent(sent: Mapping[str, Sequence[str]], key: str) -> str:
    return (sent.get(key) or ("",))[0].replace("\r\n", "\n").strip()


def _indexed(parts: Sequence[str]) -> bool:
    return len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 6
