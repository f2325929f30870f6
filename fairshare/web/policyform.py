"""The policy as a form and back: what stands in the fields, what they ask for, and what is wrong with it. Pure.

A field that was not touched changes nothing in the file. Faults and advice are those of `fairshare check`, in its
words; here they only find their field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Any

from accountant.wire import Policy, QueuePolicy
from accountant.yamlfile import faults_of
from agent.yamlfile import Key, Plain, parse
from fairshare import policy as policies
from fairshare.web.editing import LISTED, Entry, Revision, revise, revised
from fairshare.web.field import written
from fairshare.web.fields import QUEUE, SCALARS
from fairshare.web.values import look, shown, text_of, unreadable, value

MOST_QUEUES = 2_000
"""Rows that a form may send."""
_WHOLE = re.compile(r"[+-]?\d+")
_DURATIONS = frozenset(each.name for each in SCALARS if each.kind == "duration")


@dataclass(frozen=True, slots=True)
class Row:
    """One queue in the form. at: its number in the file, None for a new one. gone: it is to be taken away."""

    at: int | None
    values: Mapping[str, str]
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """What stands in the fields, as text. values: by name of the field."""

    values: Mapping[str, str]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """field: the name of the form's field it belongs beside, "" for none. place: file:line in the file as it would
    be. where: the path in the policy, "" where the place says enough."""

    field: str
    place: str
    message: str
    where: str = ""

    @property
    def sentence(self) -> str:
        """As `fairshare check` has it behind the place."""
        return f"{self.where}: {self.message}" if self.where else self.message

    @property
    def beside(self) -> str:
        """As its field has it: of a part with a structure of its own, which value."""
        return self.sentence if self.where.startswith(f"{self.field}.") else self.message


@dataclass(frozen=True, slots=True)
class Draft:
    """What a form asks for. policy None: it is faulty. edited: the file's own text with the changes in it; False: it
    had to be written anew."""

    text: str
    edited: bool
    policy: Policy | None
    faults: tuple[Finding, ...] = ()
    advice: tuple[Finding, ...] = ()

    @property
    def sound(self) -> bool:
        return self.policy is not None


@dataclass(frozen=True, slots=True)
class Standing:
    """The file as it stands. name: as people know it."""

    text: str
    name: str
    data: dict[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def of(cls, text: str, name: str) -> Standing:
        """Raises FileFault for what is no YAML."""
        data = parse(text, name).data
        return cls(text, name, data if isinstance(data, dict) else {})

    @property
    def queues(self) -> list[dict[str, Any]]:
        found = self.data.get(LISTED)
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def form_of(standing: Standing) -> Form:
    """The fields as the file fills them; what it leaves out is empty."""
    values = {each.name: shown(each, look(standing.data, each.path)) for each in SCALARS}
    rows = tuple(
        Row(at, {each.name: shown(each, queue.get(each.name)) for each in QUEUE})
        for at, queue in enumerate(standing.queues)
    )
    return Form(values, rows)


def form_from(sent: Mapping[str, Sequence[str]]) -> Form:
    """The fields as a browser sends them: `window.size`, `queues.3.weight`, `queues.3.at`, `queues.3.gone`. Raises
    ValueError for what no form of ours sends."""
    values = {each.name: _sent(sent, each.name) for each in SCALARS}
    numbers = sorted({int(parts[1]) for key in sent if (parts := key.split("."))[0] == LISTED and _indexed(parts)})
    if len(numbers) > MOST_QUEUES:
        raise ValueError(f"more than {MOST_QUEUES} queues")
    rows = []
    for number in numbers:
        head = f"{LISTED}.{number}."
        at = _sent(sent, head + "at")
        if at and not _WHOLE.fullmatch(at):
            raise ValueError(f"{head}at: not a number")
        rows.append(
            Row(
                int(at) if at else None,
                {each.name: _sent(sent, head + each.name) for each in QUEUE},
                bool(_sent(sent, head + "gone")),
            )
        )
    return Form(values, tuple(rows))


def with_new_row(form: Form) -> Form:
    """One more empty queue."""
    return Form(form.values, (*form.rows, Row(None, {each.name: "" for each in QUEUE})))


def draft(standing: Standing, form: Form, capacity: float | None = None) -> Draft:
    """The file that the form asks for, and what is wrong with it. capacity: GPUs, to compare quotas with. Raises
    ValueError for rows that the file does not have."""
    revision, numbers = _revision(standing, form)
    unread = {each.name: fault for each in SCALARS if (fault := unreadable(each, form.values[each.name]))}
    wanted = revised(standing.data, revision)
    text, edited = revise(standing.text, revision)
    document = parse(text, standing.name)
    found = faults_of(wanted, Policy)
    faults = tuple(
        Finding(name, document.place(path), unread.get(name, message), ".".join(map(str, path)))
        for path, message in found
        for name in [_field(path, numbers)]
    )
    if faults:
        return Draft(text, edited, None, faults)
    policy = Policy.model_validate(document.data)
    advice = tuple(
        Finding(_field(each.path, numbers), document.place(each.path), each.message)
        for each in policies.advice(policy, capacity)
    )
    return Draft(text, edited, policy, (), advice)


def difference(before: str, after: str, name: str) -> tuple[str, ...]:
    """Unified diff, a line each; empty where nothing is different."""
    return tuple(
        line.rstrip("\n")
        for line in unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), name, f"{name} (new)"
        )
    )


def changes(before: Policy, after: Policy) -> tuple[tuple[str, str, str], ...]:
    """(what, before, after) of every value that is another, queues by name, defaults filled in."""
    return tuple(_changes("", _plain(before), _plain(after)))


def names(form: Form) -> tuple[str, ...]:
    """Queues that may be a parent."""
    return tuple(dict.fromkeys(row.values["name"] for row in form.rows if row.values["name"] and not row.gone))


def _revision(standing: Standing, form: Form) -> tuple[Revision, tuple[int, ...]]:
    """The changes, and the form's row of every queue that is left."""
    values: dict[tuple[Key, ...], Plain] = {}
    for each in SCALARS:
        text, was = form.values[each.name], look(standing.data, each.path)
        if text != shown(each, was):
            values[each.path] = value(each, text)
    entries, numbers = [], []
    for number, row in enumerate(form.rows):
        if row.gone or (row.at is None and not any(row.values.values())):
            continue
        if row.at is not None and not 0 <= row.at < len(standing.queues):
            raise ValueError(f"the file has no queue {row.at}: it has changed since the form was opened")
        base = standing.queues[row.at] if row.at is not None else {}
        changed = {
            each.name: value(each, row.values[each.name])
            for each in QUEUE
            if row.values[each.name] != shown(each, base.get(each.name))
        }
        entries.append(Entry(row.at, changed))
        numbers.append(number)
    return Revision(values, tuple(entries)), tuple(numbers)


def _field(path: Sequence[Key], numbers: Sequence[int]) -> str:
    """The field that a fault belongs beside. A list's own faults are those of its only field."""
    keys = tuple(path)
    if len(keys) >= 2 and keys[0] == LISTED and isinstance(keys[1], int):
        key = keys[2] if len(keys) > 2 else "name"
        return f"{LISTED}.{numbers[keys[1]]}.{key}" if keys[1] < len(numbers) else ""
    known = {each.path for each in SCALARS}
    return next((".".join(map(str, keys[:n])) for n in range(len(keys), 0, -1) if keys[:n] in known), "")


def _sent(sent: Mapping[str, Sequence[str]], key: str) -> str:
    return (sent.get(key) or ("",))[0].replace("\r\n", "\n").strip()


def _indexed(parts: Sequence[str]) -> bool:
    return len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 6


def _plain(policy: Policy) -> dict[str, Any]:
    plain = policy.model_dump(mode="json", by_alias=True)
    plain[LISTED] = {queue.name: _without_name(queue) for queue in policy.queues}
    return plain


def _without_name(queue: QueuePolicy) -> dict[str, Any]:
    return queue.model_dump(mode="json", exclude={"name"})


def _changes(at: str, before: Any, after: Any) -> Iterator[tuple[str, str, str]]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            yield from _changes(f"{at}.{key}" if at else str(key), before.get(key), after.get(key))
    elif isinstance(after, Mapping) and before is None:
        yield at, "", "new"
    elif isinstance(before, Mapping) and after is None:
        yield at, "there", "gone"
    else:
        words = _duration if at in _DURATIONS else text_of
        yield at, words(before) or "none", words(after) or "none"


def _duration(seconds: Any) -> str:
    return written(seconds) if isinstance(seconds, int) else text_of(seconds)
