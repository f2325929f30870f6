"""Explains a recorded decision in words and numbers, and reads the shares of queues from decisions, for the pages of
the accountant and of the controller.

All values come from the decision itself and from those of the same cycle, as the controller posted them. A posted
decision is external JSON, so missing values and values that are not numbers are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from accountant.wire.policy_models import Decision
from gputally.base import number_format
from gputally.base.number_format import NOTHING, gpus, hours, percent

_MOST: Final = 10**20
"""Larger numbers, and NaN, are not shown."""


def amount(value: float | None, unit: str) -> str:
    """The usage or the capacity of a window as text with its unit; a dash if it is unknown."""
    if value is None or value < 0:
        return NOTHING
    return f"{hours(round(value))} GPU-h" if unit == "gpu_us" else f"{value:,.0f} {unit}".rstrip()


def limit(value: Any) -> str:
    """A number of GPUs as text; -1 is unlimited."""
    count = number(value)
    return "unlimited" if count == -1 else of_gpus(value)


def of_gpus(value: Any) -> str:
    """A number of GPUs as text; a dash if the value is no number."""
    count = number(value)
    return NOTHING if count is None else gpus(count)


def one_decimal(value: Any) -> str:
    """A number as text with one decimal; a dash if the value is no number."""
    count = number(value)
    return NOTHING if count is None else number_format.number(Decimal(str(count)), 1)


def four_digits(value: float) -> str:
    """A weight, or a share computed by a law, as text with four significant digits."""
    return f"{value:.4g}"


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) or not text else ".")


def text_of(value: Any) -> str:
    """The value as text; a dash if there is none."""
    return NOTHING if value is None or value == "" else f"{value:.4g}" if isinstance(value, float) else str(value)


def number(value: Any) -> float | None:
    """The value as a float; None if it is no number, or too large to be shown."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
        return None
    return float(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> Sequence[Any]:
    """The value if it is a list, otherwise an empty one."""
    return value if isinstance(value, list | tuple) else ()


EVERYTHING: Final = "*"
"""Subject of the record of a cycle's inputs, and of a decision to hold all weights."""
_STEPS: Final = (
    ("n", "Fair share", "its part of the configured weights of the queues that compete for GPUs beyond their quotas"),
    (
        "u",
        "Used",
        "its use of the window's capacity that it and its siblings have together, or of what they used if that is more",
    ),
    ("k", "Weight of the past", "how strongly the policy lets the difference count"),
    (
        "p",
        "Share with history",
        "what the law computes from fair share and use",
    ),
    (
        "proportional",
        "Weight by use",
        "that share as a weight; the competitors' weights add up to the configured sum",
    ),
    ("lower", "Lower bound", "the smallest weight that the policy allows"),
    ("upper", "Upper bound", "the largest weight that the policy allows"),
    ("previous", "Previous weight", "the weight that the scheduler used before"),
    ("value", "New weight", "the weight by use, or the weight that stays for the interval, or that of a turn"),
)
_RATIOS: Final = frozenset({"n", "u"})
_TRACE: Final = {"U": "u", "P": "p"}
"""Names in a trace of figures that are in `_STEPS` by another name."""
_OF_TURNS: Final = {
    "owed_gpu_h": ("Owed", "GPU-hours that it had less than its share, which count for its next turn; below 0: more"),
    "turn_until_ms": ("End of the turn", "until when one queue has a turn, UTC"),
    "share_gpus": ("Share in the turn", "the GPUs of its share while the turn lasts"),
}
_OUTCOMES: Final = {
    "preempts": "Others give way for it.", "denied": "No workload gives way for it, so it keeps waiting.",
    "room": "Enough GPUs are free for it.",
}  # fmt: skip
_TRIGGERS: Final = {
    "waits": "because it waits", "latency": "because a latency is over its threshold",
    "by hand": "because a person requested it", "idle": "because held GPUs are idle",
}  # fmt: skip
_HOLDS: Final = {
    "AccountantUnavailable": "the accountant did not answer", "StaleUsage": "the newest usage is too old",
    "LowCoverage": "too little of the window is metered", "NoUsage": "no usage is known",
    "NoCapacity": "no capacity is known", "PolicyNotInForce": "the accountant does not count by this policy yet",
}  # fmt: skip
"""The causes of a hold, by its reason; other reasons say themselves what is the matter."""
_DONE: Final = {
    "applied": "It was written to the scheduler.", "would-apply": "A dry run: nothing was written.",
    "contested": "Another field manager owns the field, so it was not written.",
    "refused": "The API server refused it.", "gone": "The object no longer exists.",
    "unavailable": "The API server did not answer.", "deferred": "It was postponed.",
    "stopped": "It was stopped.", "would-stop": "A dry run: nothing was stopped.",
    "blocked": "It could not be stopped.", "partly": "Some of its pods were stopped.",
    "another": "Its name now belongs to another object.",
    "unconfirmed": "The API server did not answer whether it was stopped; it counts as stopped.",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of a decision's page.

    lead: an introductory sentence, or "".
    text: number of leading columns that contain words.
    strong: indices of the rows about the decision's subject."""

    title: str
    lead: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: int = 1
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DecisionText:
    """A decision explained in sentences and tables.

    title: the question that the text answers.
    related: other decisions of the cycle, each with a label."""

    title: str
    sentences: tuple[str, ...]
    facts: tuple[tuple[str, str], ...] = ()
    grids: tuple[TextTable, ...] = ()
    related: tuple[tuple[str, Decision], ...] = ()


@dataclass(frozen=True, slots=True)
class QueueStanding:
    """A queue's figures in the last recorded cycle.

    cycle: the record of the cycle.
    holds, asks, due: GPUs that the queue held, requested and was due; None if unknown.
    used: its part of the window's capacity."""

    queue: str
    cycle: Decision
    holds: float | None
    asks: float | None
    due: float | None
    weight: float | None
    used: float | None

    @property
    def left(self) -> float | None:
        """GPUs that the queue is due and does not hold; negative if it holds more."""
        return None if self.due is None or self.holds is None else self.due - self.holds


def decision_text(decision: Decision, cycle: Sequence[Decision], next_ms: int | None = None) -> DecisionText:
    """The explanation of a decision.

    cycle: the decisions of the same instant, with or without this one.
    next_ms: of a hold, when the next weight was decided; None if it is not known, or none was."""
    inputs = decision.inputs
    if decision.kind == "hold":
        return _hold(decision, next_ms)
    if decision.kind == "policy":
        return _policy(decision)
    record = _record(decision, cycle)
    if decision.kind == "weight":
        return _cycle(decision, cycle) if "window" in inputs else _weight(decision, record, cycle)
    if "verdict" in inputs:
        return _verdict(decision, record, cycle)
    if "claimant" in inputs:
        return _victim(decision, cycle)
    return DecisionText(
        "Inputs of the preemption decisions", (), _free(inputs), _accounts(inputs), _others(decision, cycle)
    )


def _hold(decision: Decision, next_ms: int | None) -> DecisionText:
    cause = _HOLDS.get(decision.reason.partition(":")[0], "")
    kept = f"From {_utc(decision.at_ms)} UTC on, the last good weights stay in force"
    sentences = [f"{kept}, because {cause}." if cause else f"{kept}.", sentence(decision.reason)]
    if next_ms is not None:
        sentences.append(f"Weights were decided again by {_utc(next_ms)} UTC.")
    return DecisionText("Why the weights were kept", tuple(sentences))


def _policy(decision: Decision) -> DecisionText:
    inputs = decision.inputs
    facts = [("Policy before", text_of(inputs.get("before"))), ("Policy", decision.policy_version)]
    facts += [("Saved by", str(inputs["by"]))] if inputs.get("by") else []
    lines = tuple((str(line),) for line in as_list(inputs.get("difference")))
    more = number(inputs.get("more"))
    lead = f"{more:,.0f} more values changed." if more else "Settings with their defaults, queues by name."
    grids = (TextTable("Difference", lead, ("Line",), lines),) if lines else ()
    return DecisionText("What changed in the policy", (sentence(decision.reason),), tuple(facts), grids)


def shares(decisions: Iterable[Decision], queues: Sequence[str]) -> list[QueueStanding]:
    """The shares of these queues, one for each target, from the newest record that contains the queue. The weight is
    that of the newest decision about the queue, if this is not older: a record has the weight from before its cycle.

    decisions: newest first."""
    by_queue: dict[tuple[str, str], QueueStanding] = {}
    decided: dict[tuple[str, str], Decision] = {}
    for decision in decisions:
        if decision.kind != "weight":
            continue
        if decision.subject != EVERYTHING:
            decided.setdefault((decision.subject, decision.target), decision)
            continue
        for queue in queues:
            if queue in mapping(decision.inputs.get("standings")):
                by_queue.setdefault((queue, decision.target), _share(queue, decision))
    for key, decision in decided.items():
        if key in by_queue and decision.at_ms >= by_queue[key].cycle.at_ms:
            by_queue[key] = replace(by_queue[key], weight=decision.value)
    return [by_queue[key] for key in sorted(by_queue)]


def is_record(decision: Decision) -> bool:
    """Whether this is the record of a cycle's inputs, to which other decisions refer."""
    return decision.subject == EVERYTHING and decision.kind in ("weight", "preemption")


def _weight(decision: Decision, record: Decision | None, cycle: Sequence[Decision]) -> DecisionText:
    inputs, subject = decision.inputs, decision.subject
    parts = mapping(inputs.get("explanation"))
    dry = decision.mode == "dry-run"
    if decision.value is None:
        first = f"The weight of {subject} is no longer computed."
    elif decision.previous is None:
        first = f"The weight of {subject} {'would be' if dry else 'was'} set to {four_digits(decision.value)}."
    else:
        went = "would go" if dry else "went"
        first = (
            f"The weight of {subject} {went} from {four_digits(decision.previous)} to {four_digits(decision.value)}."
        )
    sentences = [first]
    used, due = number(parts.get("u")), number(parts.get("n"))
    window = mapping(record.inputs.get("window")) if record else {}
    if used is not None and due is not None:
        beside = "more than" if used > due else "less than"
        held = "equal to" if percent(used) == percent(due) else beside
        sentences.append(
            f"In the window it used {percent(used)} of the capacity of its siblings and itself, {held} its fair share "
            f"of {percent(due)}."
        )
    sentences.append(sentence(decision.reason))
    sentences += [sentence(str(note)) for note in as_list(parts.get("notes")) if str(note) not in decision.reason]
    sentences += filter(None, [_DONE.get(str(inputs.get("result")), "")])
    sentences += [sentence(str(inputs["detail"]))] if inputs.get("detail") else []
    usage, capacity, unit = number(parts.get("usage")), number(parts.get("capacity")), str(window.get("unit", ""))
    rows = []
    for name, title, meaning in _STEPS:
        value = number(parts.get(name))
        if value is not None:
            words = _formula(parts) or meaning if name == "p" else meaning
            rows.append((title, words, percent(value, 2) if name in _RATIOS else four_digits(value)))
    if usage is not None and capacity is not None and rows:
        rows.insert(1, ("Usage", f"of {amount(capacity, unit)} in the window", amount(usage, unit)))
    known = {title for title, _, _ in rows}
    rows += [step for step in trace_in_words(mapping(parts.get("trace"))) if step[0] not in known]
    grids = [
        TextTable(
            "From history to weight",
            "Each figure follows from those above it.",
            ("Step", "What it is", "Figure"),
            tuple(rows),
            2,
        )
    ]
    facts = [("Object", str(inputs.get("object", ""))), ("Published as", text_of(inputs.get("published")))]
    grids += _queues(record, subject, cycle)
    return DecisionText(
        f"Why the weight of {subject} changed",
        tuple(sentences),
        (*(fact for fact in facts if fact[1]), *_window(record)),
        tuple(grid for grid in grids if grid.rows),
        (("the whole cycle", record),) if record else (),
    )


def trace_in_words(trace: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """The intermediate results of a weight: the step in words, what it is, and the figure. A step of another law has
    the name that the law gives it."""
    words = {name: (title, meaning) for name, title, meaning in _STEPS} | _OF_TURNS
    rows = []
    for name, each in trace.items():
        figure, step = number(each), _TRACE.get(name, name)
        if figure is None:
            continue
        shown = (
            percent(figure, 2) if step in _RATIOS else _utc(figure) if step == "turn_until_ms" else four_digits(figure)
        )
        rows.append((*words.get(step, (str(name), "")), shown))
    return tuple(rows)


def _utc(at_ms: float) -> str:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return NOTHING


def _formula(parts: Mapping[str, Any]) -> str:
    """The share with history in words and with its numbers; "" if one is missing."""
    n, u, k = (number(parts.get(name)) for name in ("n", "u", "k"))
    if n is None or u is None or k is None:
        return ""
    fair, used, weight = map(four_digits, (n, u, k))
    return (
        "fair share + weight of the past × (fair share − used), and not below 0: "
        f"max(0, {fair} + {weight} × ({fair} − {used}))"
    )


def _cycle(decision: Decision, cycle: Sequence[Decision]) -> DecisionText:
    return DecisionText(
        "Inputs of the weights",
        ("Usage in one window, and the GPUs that every queue requested and held at that time.",),
        _window(decision),
        tuple(_queues(decision, None, cycle)),
        _others(decision, cycle),
    )


def _verdict(decision: Decision, record: Decision | None, cycle: Sequence[Decision]) -> DecisionText:
    verdict = mapping(decision.inputs.get("verdict"))
    size, trigger = number(verdict.get("gpus")), str(verdict.get("trigger", ""))
    requested = f"{gpus(size)} GPUs" if size is not None else "GPUs"
    first = f"{decision.subject} asks for {requested} {_TRIGGERS.get(trigger, '')}".rstrip()
    outcome = str(verdict.get("outcome", ""))
    victims = [mapping(each) for each in as_list(verdict.get("victims"))]
    spared = [mapping(each) for each in as_list(verdict.get("spared"))]
    grids = [
        TextTable("Workloads that give way", "", ("Workload", "Team", "Ground", "Why", "GPUs", "GPU-hours lost"), tuple(
            (_gang(each), text_of(each.get("team")), text_of(each.get("ground")), text_of(each.get("reason")),
             of_gpus(each.get("gpus")), one_decimal(each.get("lost_gpu_hours"))) for each in victims), 4),
        TextTable("Workloads that were considered and stay", "", ("Workload", "Queue", "Why"), tuple(
            (text_of(each.get("key")), text_of(each.get("queue")), text_of(each.get("reason"))) for each in spared), 3),
        *(_accounts(record.inputs, str(verdict.get("queue", ""))) if record else ()),
    ]  # fmt: skip
    title = f"Why {decision.subject} {'may start' if outcome in ('preempts', 'room') else 'waits'}"
    return DecisionText(
        title,
        (first + ".", _OUTCOMES.get(outcome, ""), sentence(decision.reason)),
        (("Queue", text_of(verdict.get("queue"))), *(_free(record.inputs) if record else ())),
        tuple(grid for grid in grids if grid.rows),
        _others(decision, [other for other in cycle if other.id.startswith(f"{decision.id}/") or other is record]),
    )


def _victim(decision: Decision, cycle: Sequence[Decision]) -> DecisionText:
    inputs = decision.inputs
    pods = [str(each) for each in as_list(inputs.get("pods"))]
    gave_up = number(decision.value)
    size = f"{gpus(gave_up)} GPUs" if gave_up is not None else "its GPUs"
    part = "" if inputs.get("whole", True) else " of what it held"
    gave = "would give" if decision.mode == "dry-run" else "gave"
    sentences = (
        f"{decision.subject} {gave} way with {size}{part} for {text_of(inputs.get('claimant'))}.",
        sentence(decision.reason),
        _DONE.get(str(inputs.get("result", "")), ""),
        sentence(str(inputs.get("detail") or "")),
    )
    claims = [one for one in cycle if decision.id.startswith(f"{one.id}/") and "verdict" in one.inputs]
    record = _record(decision, cycle)
    return DecisionText(
        f"Why {decision.subject} was preempted",
        tuple(filter(None, sentences)),
        (
            ("For", text_of(inputs.get("claimant"))), ("Ground", text_of(inputs.get("ground"))),
            ("Queue", text_of(inputs.get("queue"))), ("Team", text_of(inputs.get("team"))),
            ("Work lost", f"{one_decimal(inputs.get('lost_gpu_hours'))} GPU-hours"),
            ("Pods", ", ".join(pods) or NOTHING),
        ),
        tuple(_accounts(record.inputs, str(inputs.get("queue", ""))) if record else ()),
        (*(("the claim it gave way for", one) for one in claims), *((("the whole cycle", record),) if record else ())),
    )  # fmt: skip


def _others(decision: Decision, cycle: Sequence[Decision]) -> tuple[tuple[str, Decision], ...]:
    """The other decisions of the same cycle, the record last."""
    of_cycle = [
        other for other in cycle if other.id != decision.id and (other.id + "/").startswith(_cycle_id(decision) + "/")
    ]
    labelled = [(f"{other.subject}: {other.reason}", other) for other in of_cycle if not is_record(other)]
    return (*labelled, *(("the whole cycle", other) for other in of_cycle if is_record(other)))


def _record(decision: Decision, cycle: Sequence[Decision]) -> Decision | None:
    cycle_id = _cycle_id(decision)
    return next((candidate for candidate in cycle if candidate.id == cycle_id and is_record(candidate)), None)


def _cycle_id(decision: Decision) -> str:
    return str(decision.inputs.get("cycle", decision.id))


def _queues(record: Decision | None, subject: str | None, cycle: Sequence[Decision]) -> list[TextTable]:
    """A table of every queue's usage, requested and held GPUs, entitlement, and weight before and after the cycle. The
    record has the weights from before; one that the cycle did not decide stays."""
    if record is None:
        return []
    decided = {
        one.subject: number(one.value)
        for one in cycle
        if (one.kind, one.cluster, _cycle_id(one)) == ("weight", record.cluster, record.id)
    }
    names = sorted(mapping(record.inputs.get("standings")))
    window = mapping(record.inputs.get("window"))
    usage, unit = mapping(window.get("usage")), str(window.get("unit", ""))
    queue_shares = [_share(name, record) for name in names]
    rows = tuple(
        (
            share.queue,
            amount(number(usage.get(share.queue)), unit),
            percent(share.used),
            *(of_gpus(each) for each in (share.asks, share.holds, share.due)),
            *(
                four_digits(weight) if weight is not None else NOTHING
                for weight in (share.weight, decided.get(share.queue, share.weight))
            ),
        )
        for share in queue_shares
    )
    lead = (
        "Usage in the window; GPUs requested, held and due at that time. A parent includes its children. The weight "
        "before is that of the scheduler, the weight now is what this cycle computed."
    )
    columns = ("Queue", "Used", "Of capacity", "Asks", "Holds", "Due", "Weight before", "Weight now")
    strong = frozenset(i for i, share in enumerate(queue_shares) if share.queue == subject)
    return [TextTable("Every queue at that time", lead, columns, rows, 1, strong)]


def _share(queue: str, record: Decision) -> QueueStanding:
    standing = mapping(mapping(record.inputs.get("standings")).get(queue))
    window = mapping(record.inputs.get("window"))
    usage, capacity = number(mapping(window.get("usage")).get(queue)), number(window.get("capacity"))
    return QueueStanding(
        queue, record, number(standing.get("allocated")), number(standing.get("requested")),
        number(mapping(record.inputs.get("due")).get(queue)), number(standing.get("weight")),
        usage / capacity if usage is not None and capacity else None,
    )  # fmt: skip


def _window(record: Decision | None) -> tuple[tuple[str, str], ...]:
    window = mapping(record.inputs.get("window")) if record else {}
    if not window:
        return ()
    start, end, half = (number(window.get(name)) for name in ("start_ms", "end_ms", "half_life_s"))
    length = f"{(end - start) / 86_400_000:,.1f} days" if start is not None and end is not None else ""
    facts = [
        ("Window", f"{window.get('kind', '')}, {length}" + (f", half-life {half / 86_400:,.1f} days" if half else "")),
        ("Measured", f"{window.get('measure', '')}, {percent(number(window.get('coverage')), 2)} of it metered"),
        ("Capacity", amount(number(window.get("capacity")), str(window.get("unit", "")))),
    ]
    size = number(record.inputs.get("gpus")) if record else None
    return (*facts, *((("GPUs at that time", gpus(size)),) if size is not None else ()))


def _accounts(inputs: Mapping[str, Any], queue: str = "") -> tuple[TextTable, ...]:
    """A table of the GPUs of every queue in the situation that a preemption was decided from."""
    names, rows = [], []
    for name, account in sorted(mapping(mapping(inputs.get("situation")).get("accounts")).items()):
        for stock in map(mapping, mapping(mapping(account).get("stocks")).values()):
            names.append(name)
            rows.append((name, *(limit(stock.get(part)) for part in ("deserved", "share", "limit", "allocated"))))
            break
    strong = frozenset(i for i, name in enumerate(names) if name == queue)
    columns = ("Queue", "Guaranteed", "Due", "Limit", "Holds")
    lead = "In GPUs."
    return (TextTable("Every queue at that time", lead, columns, tuple(rows), 1, strong),) if rows else ()


def _free(inputs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    free = [
        figure for each in mapping(mapping(inputs.get("situation")).get("free")).values() if (figure := number(each))
    ]
    return (("Free at that time", f"{gpus(sum(free))} GPUs on {len(free)} nodes"),) if "situation" in inputs else ()


def _gang(victim: Mapping[str, Any]) -> str:
    gang = mapping(victim.get("gang"))
    return f"{gang.get('namespace', '')}/{gang.get('name', '')}" if gang else NOTHING
