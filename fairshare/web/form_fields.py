"""What a field of the policy form is, and the fields of a scheduler's section, which come from the section's model.

A model says in pydantic's words what the form shows: the title of the model is the scheduler's name for people, and the
title and the description of a field are its label and its hint. `accountant.wire.option_types.ChoiceTexts` explains
choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from accountant.wire.option_types import ChoiceTexts
from fairshare.controller.policy_difference import duration_text
from fairshare.targets.weight_plan import Adapter
from gputally.base.plugins import within
from gputally.server.config_loading import parse_duration

Kind = Literal["number", "duration", "instant", "text", "choice", "switch", "list", "yaml"]
"""The kind of a field. switch: true or false. yaml: a list or a mapping of the file, as YAML text."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the form for one value of the policy.

    path: the value's keys in the policy, or its key in a queue.
    help: a hint for the user; for the kind `yaml` an example.
    choices: the values of the kind `choice`, with their texts.
    section: the model that has the last key, if the policy's own models do not have it."""

    path: tuple[str, ...]
    label: str
    kind: Kind
    help: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    section: type[BaseModel] | None = None

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def default(self, model: type[BaseModel]) -> str:
        """Return the model's default as the form shows it; "" if the key is required, "computed" if a factory of
        another package does not give it alone."""
        default: Any = self.section or model
        for key in self.path[-1:] if self.section else self.path:
            info = default.__pydantic_fields__[key]
            if info.is_required():
                return ""
            default = info.default
            if info.default_factory is not None:
                try:
                    default = within(_MOST_FACTORY_S, partial(_from_factory, info))
                except Exception:  # noqa: BLE001 - it depends on other fields, or fails: the policy's check says so
                    return "computed"
        if self.kind == "switch":
            return "yes" if default else "no"
        if default is None or self.kind == "yaml" or default == ():
            return "none"
        if self.kind == "duration":
            return duration_text(default) if isinstance(default, int) else str(default)
        return f"{default:g}" if isinstance(default, float) else str(default)


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Fields under one heading. lead: the sentence below the heading. folded: True if the page hides the fields until
    the user opens them."""

    title: str
    lead: str
    fields: tuple[Field, ...]
    folded: bool = False


_TEXTS: Final = {
    "weight": "published to its queues",
    "dry-run": "printed, not written",
    "enforce": "written to the cluster",
}
"""What words say that many sections have."""
_MOST_FIELDS: Final = 20
_MOST_FACTORY_S: Final = 1.0


def _from_factory(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True, validated_data={})


def targets(adapters: Iterable[Adapter]) -> FieldGroup:
    """Return the fields of the schedulers' sections."""
    return FieldGroup(
        "Targets",
        "The schedulers that receive weights, and whether decisions are written or only printed.",
        tuple(each for adapter in adapters for each in _of_section(adapter)),
        folded=True,
    )


def _of_section(adapter: Adapter) -> Iterator[Field]:
    model = adapter.settings
    title = model.model_config.get("title") or adapter.name
    labels = {"mode": title, "apply": f"{title} applies"}
    for key, info in [*model.model_fields.items()][:_MOST_FIELDS]:
        texts = _TEXTS | next((dict(one.of) for one in info.metadata if isinstance(one, ChoiceTexts)), {})
        words = _words(info.annotation)
        yield Field(
            ("targets", adapter.section, key),
            info.title or labels.get(key, f"{title}: {key}"),
            "choice" if words else _kind(info.annotation, info.metadata),
            info.description or "",
            tuple((word, f"{word}: {texts[word]}" if word in texts else word) for word in words),
            model,
        )


def _words(annotation: Any) -> tuple[str, ...]:
    """Return the words of a Literal; none for another type."""
    words = get_args(annotation) if get_origin(annotation) is Literal else ()
    return words if all(isinstance(word, str) for word in words) else ()


def _kind(annotation: Any, metadata: Iterable[object]) -> Kind:
    if any(getattr(one, "func", None) is parse_duration for one in metadata):
        return "duration"
    kinds = {each for each in get_args(annotation) or (annotation,) if each is not NoneType}
    if kinds == {bool}:
        return "switch"
    if kinds and kinds <= {int, float}:
        return "number"
    return "text" if kinds == {str} else "yaml"
