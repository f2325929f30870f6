"""The policy file edited through the form: every unedited byte stays."""

from __future__ import annotations

from difflib import ndiff
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from accountant.wire.policy_models import Policy, QueuePolicy
from fairshare.controller.policy_difference import _DURATIONS, changes, duration_text
from fairshare.controller.policy_file import policy_of_document
from fairshare.web.policy_form import (
    QUEUE,
    ChangedQueue,
    Form,
    FormRow,
    PolicyText,
    Revision,
    draft,
    form_from,
    form_of,
    policy_text,
    revise,
    revised,
    scalars,
    with_new_row,
)
from gputally.base.yaml_file import parse
from tests.fairshare import samples

SAMPLE = samples.policy_text()


def standing(text: str = SAMPLE) -> PolicyText:
    return PolicyText.of(text, "policy.yaml")


def fill(form: Form, **values: str) -> Form:
    """Return the form's scalars by name, with "__" for the dot."""
    return Form({**form.values, **{key.replace("__", "."): value for key, value in values.items()}}, form.rows)


def fill_row(form: Form, number: int, gone: bool = False, **values: str) -> Form:
    rows = list(form.rows)
    rows[number] = FormRow(rows[number].at, {**rows[number].values, **values}, gone)
    return Form(form.values, tuple(rows))


def differing(before: str, after: str) -> list[tuple[str, str]]:
    old, new = before.splitlines(), after.splitlines()
    assert len(old) == len(new)
    return [(a, b) for a, b in zip(old, new, strict=True) if a != b]


def test_an_untouched_form_changes_no_letter() -> None:
    found = draft(standing(), form_of(standing()))
    assert (found.text, found.edited, found.faults) == (SAMPLE, True, ())


def test_a_changed_value_is_the_only_line_that_changes_and_keeps_its_comment() -> None:
    form = fill_row(fill(form_of(standing()), bounds__interval="90m"), 4, priority="300")
    found = draft(standing(), form)
    (interval, longer), (priority, given) = differing(SAMPLE, found.text)
    assert longer == interval.replace("3h  ", "90m "), "the comments of a section stay in one column"
    assert longer.endswith("apply at once")
    assert given == priority.replace("200", "300")
    assert given.endswith("# inference before everything that can wait")
    assert (found.policy.bounds.interval, found.policy.queues[4].priority) == (5_400, 300)


def test_what_a_file_leaves_out_is_added_where_it_belongs() -> None:
    form = fill(fill_row(form_of(standing()), 1, limit="32"), usage__clusters="prod, west")
    found = draft(standing(), form)
    assert found.edited
    assert '    refs: ["fake:vision"]\n    limit: 32\n' in found.text
    assert "usage:" in found.text
    assert found.text.count("#") == SAMPLE.count("#")


def test_emptied_fields_take_their_line_away() -> None:
    found = draft(standing(), fill(form_of(standing()), window__half_life=""))
    assert "half_life" not in found.text
    assert len(found.text.splitlines()) == len(SAMPLE.splitlines()) - 1


def test_queues_come_and_go() -> None:
    form = fill_row(form_of(standing()), 5, gone=True)
    form = fill_row(with_new_row(form), 6, name="a: b", parent="research", weight="2", refs="fake:ab, kueue:x/y")
    found = draft(standing(), form)
    assert found.edited
    assert "  - {name: 'a: b', parent: research, weight: 2, refs: ['fake:ab', 'kueue:x/y']}\n" in found.text
    assert [each["name"] for each in PolicyText.of(found.text, "x").queues][-1] == "a: b"
    assert "fake:students" not in found.text
    # Its budget is left without a queue: said where the budget stands.
    (fault,) = found.faults
    assert (fault.field, fault.message) == ("budgets", "budget 'students-hours' names the unknown queue 'students'")
    assert fault.place.startswith("policy.yaml:")


def test_an_empty_new_row_is_no_queue() -> None:
    assert draft(standing(), with_new_row(form_of(standing()))).text == SAMPLE


def test_faults_stand_beside_their_field_in_the_words_of_check() -> None:
    form = fill(form_of(standing()), window__half_life="soon", k="much")
    form = fill_row(fill_row(form, 0, gone=True), 2, weight="-1")
    found = draft(standing(), form)
    assert found.policy is None
    assert [(each.field, each.message) for each in found.faults] == [
        ("window.half_life", "not a duration: 'soon' (write for example 7d, 12h, 1h30m)"),
        ("k", "must be a number"),
        ("queues.2.weight", "must be at least 0"),
    ]
    by_name = {each.field: each for each in found.faults}
    assert found.text.splitlines()[int(by_name["k"].place.rpartition(":")[2]) - 1] == "k: much"
    assert by_name["queues.2.weight"].sentence.startswith("queues.1.weight: ")


def test_an_unknown_parent_and_advice_find_their_field() -> None:
    found = draft(standing(), fill_row(form_of(standing()), 1, parent="nobody"))
    assert [each.field for each in found.faults] == ["queues.1.parent"]
    wasteful = draft(standing(), fill(form_of(standing()), measure="busy"), capacity=10.0)
    assert {each.field for each in wasteful.advice} >= {"measure", ""}
    assert wasteful.sound


def test_rows_the_file_does_not_have_are_refused() -> None:
    form = form_of(standing())
    with pytest.raises(ValueError, match="has changed"):
        draft(standing(), Form(form.values, (*form.rows, FormRow(99, form.rows[0].values))))


@pytest.mark.parametrize(
    "text",
    [
        "base: &w {weight: 2}\nqueues:\n  - {name: a, weight: 1}\n  - {name: b, weight: 1}\n",
        "queues: [{name: a, weight: 1}, {name: b, weight: 1}]\n",
        "queues:\n- name: a\n  weight: 1\n- name: b\n  weight: 1",
        "k: 1\nqueues:\n  - weight: 1  # first\n    name: a\n  - name: b\n    weight: !!float 1\n",
        "queues:\n  - name: a\n    weight: 1\n\n    # last words\n  - name: b\n    weight: 1\nk: 3\n",
    ],
)
def test_any_layout_ends_in_exactly_what_was_asked_for(text: str) -> None:
    data: Any = parse(text, "x").data
    entries = (ChangedQueue(0, {"weight": None}), ChangedQueue(1, {"limit": 4}), ChangedQueue(None, {"name": "c"}))
    revision = Revision({("k",): 2.5, ("bounds", "max_multiplier"): 0.1}, entries)
    found, _ = revise(text, revision)
    assert parse(found, "x").data == revised(data, revision)


def test_a_list_on_one_line_is_edited_in_place() -> None:
    text = "# Ours.\n# Since May.\nqueues: [{name: a, weight: 1}]  # all\n"
    found = revise(text, Revision({("k",): 2}, (ChangedQueue(0, {"weight": 3}),)))
    assert found == ("# Ours.\n# Since May.\nqueues: [{name: a, weight: 3}]  # all\nk: 2\n", True)


def test_an_order_that_changes_is_written_from_the_data_under_the_comments_the_file_began_with() -> None:
    text = "# Ours.\n# Since May.\nqueues: [{name: a, weight: 1}, {name: b}]\n"
    found, edited = revise(text, Revision({("k",): 2}, (ChangedQueue(1, {}), ChangedQueue(0, {"weight": 3}))))
    assert not edited
    assert found == "# Ours.\n# Since May.\nqueues:\n  - {name: b}\n  - {name: a, weight: 3}\nk: 2\n"


COMMENTED = """# head

# of the queues
queues:
  # of a
  - {name: a,     weight: 1}   # a's
  # of b
  - {name: bb,    weight: 1}   # b's
  # of c
  - name: ccc
    weight: 1  # c's

    # of its refs
    refs: [ "fake:c" ]
  # after all
# of the bounds
bounds: {max_multiplier:   2.0,
         min_multiplier: 0.1}
"""


KEPT = (ChangedQueue(0, {}), ChangedQueue(1, {}), ChangedQueue(2, {}))


@pytest.mark.parametrize(
    ("values", "entries", "lines"),
    [
        ({}, (ChangedQueue(0, {"weight": 2}), *KEPT[1:]), "-+- {name: a, weight: 2}       # a's"),
        ({}, (*KEPT[:2], ChangedQueue(2, {"weight": 2.5})), "-+weight: 2.5 # c's"),
        ({}, KEPT[1:], "-"),
        ({}, (*KEPT[:2], ChangedQueue(2, {"refs": None})), "-"),
        ({}, (*KEPT[:2], ChangedQueue(2, {"limit": 4})), "+limit: 4"),
        ({}, (*KEPT, ChangedQueue(None, {"name": "d", "team": "no"})), "+- {name: d, team: 'no'}"),
        ({("k",): 2}, KEPT, "+k: 2"),
    ],
)
def test_other_lines_stay_letter_for_letter(
    values: dict[tuple[str, ...], Any], entries: tuple[ChangedQueue, ...], lines: str
) -> None:
    found, edited = revise(COMMENTED, Revision(values, entries))
    assert edited
    changed = [line for line in ndiff(COMMENTED.splitlines(), found.splitlines()) if line[0] in "+-"]
    assert "".join(line[0] + (line[1:].strip() if line[0] == "+" else "") for line in changed) == lines


@pytest.mark.parametrize("nested", ["  ", "    "])
@pytest.mark.parametrize("dash", ["- ", "  - ", "    -   "])
def test_the_layout_of_a_file_is_found(nested: str, dash: str) -> None:
    inner = " " * len(dash)
    text = f"bounds:\n{nested}max_multiplier: 1  # most\n# all\nqueues:\n{dash}name: a\n{inner}weight: 1\n"
    entries = (ChangedQueue(0, {"limit": 4}), ChangedQueue(None, {"name": "b"}))
    found = revise(text, Revision({("bounds", "max_multiplier"): 2}, entries))
    changed = text.replace("max_multiplier: 1", "max_multiplier: 2")
    assert found == (changed + f"{inner}limit: 4\n{dash}{{name: b}}\n", True)


def test_a_comment_between_changed_lines_stays_where_a_queue_is_added_behind_them() -> None:
    text = "queues:\n- name: a\n  # what it weighs\n  weight: 2\n  # at most\n  limit: 8\n"
    found = revise(text, Revision({}, (ChangedQueue(0, {"weight": 1, "limit": 4}), ChangedQueue(None, {"name": "b"}))))
    assert found == (text.replace("2", "1").replace("8", "4") + "- {name: b}\n", True)


def test_changes_name_queues_and_fill_defaults_in() -> None:
    before = policy_of_document(parse(SAMPLE, "x"))
    after = draft(standing(), fill(fill_row(form_of(standing()), 1, weight="5"), window__half_life="", k="2")).policy
    assert after is not None
    changed = (("k", "1", "2"), ("queues.vision.weight", "2", "5"))
    assert changes(before, after) == changed
    assert {each.name for each in scalars() if each.kind == "duration"} == _DURATIONS


NAMES = st.text("abcdefgh-:# '\"[]{}é,|>&*!%@`0", min_size=1, max_size=8).filter(lambda text: text == text.strip())
GPUS = st.floats(0, 512).map(lambda value: round(value, 2))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Generate any tree with any scalars that the form shows."""
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    queues = []
    for n, name in enumerate(names):
        parent = draw(st.sampled_from([None, *names[:n]]))
        queues.append(
            QueuePolicy(
                name=name, parent=parent, deserved=draw(GPUS), weight=draw(GPUS),
                limit=draw(st.sampled_from([-1.0, 8.0, 0.5])), priority=draw(st.integers(-5, 500)),
                refs=tuple(draw(st.sampled_from([[], [f"fake:q{n}"], [f"fake:q{n}", f"kueue:x/y{n}"]]))),
            )
        )  # fmt: skip
    plain = {
        "window": {"size": draw(st.integers(1, 10**7)), "half_life": draw(st.sampled_from(["1d", "2d", 7200]))},
        "k": draw(GPUS),
        "bounds": {"max_multiplier": draw(st.floats(1, 5)), "interval": draw(st.integers(0, 10**5))},
        "queues": [queue.model_dump(mode="json") for queue in queues],
    }
    return Policy.model_validate(plain)


@given(policies(), policies())
@settings(max_examples=25)
def test_a_policy_goes_through_the_form_and_back(first: Policy, second: Policy) -> None:
    """The fields of one policy, entered into the form of another, give exactly the first."""
    text = policy_text(first.model_dump(mode="json", by_alias=True, exclude_defaults=True), "# kept\n")
    here = PolicyText.of(text, "policy.yaml")
    assert draft(here, form_of(here)).text == text
    there, wanted = (
        form_of(PolicyText.of(policy_text(second.model_dump(mode="json", by_alias=True, exclude_defaults=bare)), "x"))
        for bare in (False, True)
    )
    assert set(there.values) == set(wanted.values)
    rows = tuple(FormRow(n if n < len(here.queues) else None, row.values) for n, row in enumerate(wanted.rows))
    found = draft(here, Form(wanted.values, rows))
    assert found.faults == ()
    assert found.policy == second
    assert found.text.startswith("# kept\n")


@given(policies(), st.data())
@settings(max_examples=25)
def test_all_comments_stay_while_values_change(policy: Policy, data: st.DataObject) -> None:
    """In the block style of `kubectl` and editors, with a comment above and after every line."""
    plain = policy.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    lines = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1_000).splitlines()
    margins = [line[: len(line) - len(line.lstrip())] for line in lines]
    text = "".join(f"{margins[n]}# {n} above\n{line}  # {n}.\n" for n, line in enumerate(lines))
    entries = tuple(
        ChangedQueue(n, {"weight": data.draw(GPUS), "limit": data.draw(GPUS)}) for n in range(len(policy.queues))
    )
    revision = Revision(
        {("bounds", "max_multiplier"): data.draw(GPUS)}, (*entries, ChangedQueue(None, {"name": "new"}))
    )
    found, edited = revise(text, revision)
    assert edited
    comments = [comment for n in range(len(lines)) for comment in (f"# {n} above", f"# {n}.")]
    assert [comment for comment in comments if comment not in found] == []


@given(policies())
@settings(max_examples=15)
def test_a_browser_sends_what_was_shown(policy: Policy) -> None:
    shown = form_of(PolicyText.of(policy_text(policy.model_dump(mode="json", by_alias=True)), "x"))
    sent = {name: [value] for name, value in shown.values.items()}
    for n, row in enumerate(shown.rows):
        sent |= {f"queues.{n}.{key}": [value] for key, value in row.values.items()}
        sent[f"queues.{n}.at"] = [str(row.at)]
    assert form_from(sent) == shown


def test_every_field_is_one_of_the_policy_and_says_its_default() -> None:
    assert {each.name: each.default(Policy) for each in scalars()}["window.size"] == "7d"
    assert {each.name: each.default(QueuePolicy) for each in QUEUE} == {
        "name": "", "parent": "none", "deserved": "0", "weight": "1", "limit": "-1", "priority": "100", "team": "none",
        "refs": "none", "turn": "gang", "gpu_models": "none",
    }  # fmt: skip
    durations = {0: "0s", 59: "59s", 90: "90s", 5_400: "90m", 7_200: "2h", 86_400: "1d"}
    assert {seconds: duration_text(seconds) for seconds in durations} == durations


EVERYTHING = """# all that a policy may say
window: {kind: tumbling, size: 7d, start: 2026-10-01T00:00:00Z, half_life: 2d, decay: slurm, calc_period: 5m,
         gpu_weights: {H100: 2.5, A100: 1}}
targets:
  fake: {mode: off}
  fake_pods:
    mode: weight  # as before
    apply: enforce
budgets:
  # of the vision team
  - {name: vision-eur, team: vision, limit: 20000.5, currency: EUR, thresholds: [0.8, 1.0]}
  - {name: b-hours, queue: b, limit: 500, exhausted: no-over-quota}
preemption:
  mode: enforce
  quota: false
  targets: {fake_pods: dry-run}
  classes:
    - {name: urgent, value: 1000}
    - {name: never, value: 1, preempts: false}
  slos: [{name: chat, queue: b, query: "max(up) > 0", above: 2s, sustained: 5m, gpus: 4}]
  idle: {mode: enforce, below: 0.1, exempt: {namespaces: ["prod-*"], labels: {keep: "*"}}}
queues:
  - {name: a, weight: 2}
  - {name: b}
"""


def leaves(model: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all values of a model; a list or mapping counts as one."""
    found = []
    for name, info in model.__pydantic_fields__.items():
        inner = info.annotation
        below = isinstance(inner, type) and hasattr(inner, "__pydantic_fields__")
        found += leaves(inner, (*path, name)) if below else [(*path, name)]
    return found


def test_the_form_shows_all_that_a_policy_can_say() -> None:
    known = {each.path for each in scalars()}
    hidden = [path for path in leaves(Policy) if not any(path[:n] in known for n in range(1, len(path) + 1))]
    assert hidden == [("schema_",), ("queues",)]
    assert {name for (name,) in leaves(QueuePolicy)} == {each.name for each in QUEUE}


def test_everything_stays_as_it_is_and_comes_over_into_an_empty_file() -> None:
    here = standing(EVERYTHING)
    untouched = draft(here, form_of(here))
    assert (untouched.text, untouched.faults) == (EVERYTHING, ())
    bare = standing("# kept\nqueues:\n  - {name: a, weight: 2}  # the first\n  - {name: b}\n")
    found = draft(bare, Form(form_of(here).values, form_of(bare).rows))
    assert found.edited
    assert found.faults == ()
    assert found.policy == untouched.policy
    assert found.text.startswith("# kept\n")
    assert "# the first" in found.text
    assert "- {name: b-hours, queue: b, limit: 500, exhausted: no-over-quota}\n" in found.text


def test_a_part_with_a_structure_changes_alone() -> None:
    here = standing(EVERYTHING)
    form = form_of(here)
    assert form.values["budgets"].splitlines()[1].startswith("- {name: b-hours,")
    fewer = draft(here, fill(form, budgets=form.values["budgets"].splitlines()[0], preemption__idle=""))
    assert fewer.edited
    assert [each.name for each in fewer.policy.budgets] == ["vision-eur"]
    assert fewer.policy.preemption.idle is None
    assert "# as before" in fewer.text
    assert "  # of the vision team\n  - {name: vision-eur," in fewer.text
    assert len(fewer.text.splitlines()) == len(EVERYTHING.splitlines()) - 2, "a budget, the idle rule"


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("budgets", "- {name: x, limit: -1}", "must be above 0"),
        ("window.gpu_weights", "H100: [", "line:1:"),
        ("preemption.classes", "- {name: x", "line:1:"),
        ("preemption.quota", "perhaps", "must be true or false"),
        ("window.start", "tomorrow", "must be a date and time"),
        ("targets.fake.mode", "loud", "give 'weight' or 'off'"),
    ],
)
def test_what_is_wrong_in_a_part_is_said_beside_it(field: str, text: str, message: str) -> None:
    form = form_of(standing(EVERYTHING))
    found = draft(standing(EVERYTHING), Form({**form.values, field: text}, form.rows))
    (fault, *_) = found.faults
    assert fault.field == field
    assert fault.message.startswith(message)


@pytest.mark.parametrize(
    ("text", "changed", "mended"),
    [
        ("window: 7d\nqueues: []\n", {"window__size": "14d"}, {"window": {"size": "14d"}, "queues": []}),
        ("- {name: a}\n", {"k": "2"}, {"k": 2, "queues": []}),
        ("queues: {a: {}}\n", {"k": "2"}, {"k": 2, "queues": []}),
        ("queues:\n  - 5\n  - {name: a}\n", {"k": "2"}, {"k": 2, "queues": [{}, {"name": "a"}]}),
    ],
)  # fmt: skip
def test_a_faulty_file_can_be_mended_in_the_form(text: str, changed: dict[str, str], mended: dict[str, Any]) -> None:
    found = draft(standing(text), fill(form_of(standing(text)), **changed))
    assert yaml.safe_load(found.text) == mended


def test_a_row_is_the_entry_at_its_position_in_a_faulty_list() -> None:
    faulty = standing("queues:\n  - 5\n  - {name: a}\n")
    found = draft(faulty, fill_row(fill_row(form_of(faulty), 0, gone=True), 1, weight="2"))
    assert (found.sound, yaml.safe_load(found.text)) == (True, {"queues": [{"name": "a", "weight": 2}]})


def test_quotas_by_model_are_a_field_of_a_queue_and_a_fault_is_beside_it() -> None:
    form = form_of(standing())
    quotas = "H100: {deserved: 4, limit: 8}\nA10: {deserved: 20}"
    rows = {
        number: fill_row(form, number, gpu_models=quotas, deserved="").rows[number] for number in range(len(form.rows))
    }
    filled = Form(form.values, tuple(rows.values()))
    changed = draft(standing(), filled)
    assert changed.policy is not None, changed.faults
    assert {queue.deserved for queue in changed.policy.queues} == {24.0}
    assert form_of(PolicyText.of(changed.text, "policy.yaml")).rows[0].values["gpu_models"] == quotas
    for wrong in ("H100: {deserved: -2}", "H100: [", "A10: {}"):
        faulty = draft(standing(), fill_row(filled, 0, gpu_models=wrong, deserved="3"))
        assert {fault.field.rpartition(".")[0] for fault in faulty.faults} == {"queues.0"}, wrong
