"""Defines the sections of schedulers in a policy (`targets`, `preemption.targets`).

The model of a section is in the folder of its scheduler, whose manifest names it (`SchedulerPlugin.settings`). A policy
is put together from those of gputally's own schedulers, so the accountant, the controller and the form know the same
keys and defaults. A section of another package is stored as it is, because that package need not be installed where the
policy is stored; the controller checks it (`Adapter.settings`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from gputally.server.config_loading import Model, bare_off

if TYPE_CHECKING:
    from accountant.wire.policy_models import Policy

Apply = Literal["dry-run", "enforce"]
"""dry-run: send requests to the API server as dry runs, which change nothing."""
Mode = Annotated[Literal["off", "dry-run", "enforce"], BeforeValidator(bare_off)]


class SchedulerSection(Model):
    """The section of one of gputally's own schedulers."""

    mode: str

    def faults(self, _policy: Policy, /) -> Iterator[tuple[int, str]]:
        """Yield the queues whose refs contradict the section, each as (position, reason)."""
        return iter(())

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return this section of a policy."""
        return next(section for section in policy.targets.sections() if isinstance(section, cls))


class SchedulerTarget(Model):
    """How shares reach a scheduler. The plug-in of a scheduler with further settings derives their model from this one.

    mode: with `weight`, the controller publishes weights."""

    mode: Annotated[Literal["weight", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"


class OtherTarget(Model):
    """How shares reach a scheduler of another package. The controller checks the mode and the further keys."""

    mode: Annotated[str, BeforeValidator(bare_off), Field(max_length=63)] = "weight"
    apply: Apply = "dry-run"

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)


class TargetSections(Model):
    """The schedulers to which weights are published. A target without refs in any queue is not changed, whatever its
    mode. Further keys are names of schedulers of other packages, which the controller checks."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, OtherTarget] = Field(init=False)

    @property
    def others(self) -> Mapping[str, OtherTarget]:
        """The sections of schedulers of other packages."""
        return self.__pydantic_extra__ or {}

    def sections(self) -> Iterator[SchedulerSection]:
        """Yield the sections of gputally's own schedulers."""
        return (getattr(self, name) for name in type(self).model_fields)

    def of(self, section: str) -> Any:
        """The section of a scheduler; the default one if the policy has none."""
        return getattr(self, section) if section in type(self).model_fields else self.others.get(section, OtherTarget())


class ModesOfTargets(Model):
    """The mode of preemption for each target; None: as `PreemptionPolicy.mode`. Further keys are names of schedulers of
    other packages."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Mode | None] = Field(init=False)

    @property
    def others(self) -> Mapping[str, Mode | None]:
        """The modes of schedulers of other packages."""
        return self.__pydantic_extra__ or {}

    def of(self, section: str) -> Mode | None:
        """The mode of a scheduler."""
        own: Mode | None = getattr(self, section) if section in type(self).model_fields else None
        return self.others.get(section, own)
