"""The policy's rules of preemption: the published language of when running work gives way.

Frozen pydantic models, part of `accountant.wire.Policy`. What they mean for one workload decides
`fairshare.preemption`; here is only what can be written down.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from accountant.terms import Duration, Model, bare_off
from accountant.terms import parse_seconds as parse_seconds


class PriorityClassPolicy(Model):
    """A priority class by its value. preempts: False is `preemptionPolicy: Never`, it only waits."""

    name: str = Field(min_length=1, max_length=253)
    value: int = Field(ge=-2_147_483_648, le=1_000_000_000)
    preempts: bool = True


Mode = Annotated[Literal["off", "dry-run", "enforce"], BeforeValidator(bare_off)]


class PreemptionModes(Model):
    """Per target; None: as the whole."""

    kai: Mode | None = None
    kueue: Mode | None = None
    volcano: Mode | None = None
    kube_scheduler: Mode | None = None


class SloPolicy(Model):
    """A latency that must not stay above `above` (seconds) for longer than `sustained`; what then waits of the
    queue, or of the one workload (namespace/name), may take what others borrow.

    query: PromQL; the largest of its values, in seconds, counts. gpus: freed where nothing of it waits."""

    name: str = Field(min_length=1, max_length=253)
    queue: str | None = None
    workload: str | None = Field(default=None, pattern="^[^/]+/[^/]+$")
    query: str = Field(min_length=1, max_length=2000)
    above: Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]
    sustained: Duration = 300
    gpus: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _of_one(self) -> SloPolicy:
        if (self.queue is None) == (self.workload is None):
            raise ValueError(f"SLO {self.name!r} is of a queue or of a workload: name one of them")
        return self


class IdleExemptions(Model):
    """Whom the idle rule leaves alone. namespaces: shell patterns. labels, annotations: of the pod, by name and
    value (`*`: any). priority: of this and above."""

    namespaces: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    priority: int | None = None


class IdleReclaimPolicy(Model):
    """GPUs that are held and not used: the owner is warned, and after `grace` they are reclaimed.

    mode: at most what the target's own mode allows. below: part of the time that a pod's GPUs were busy, over
    `sustained` and again over `grace`; time of which nothing is known counts as busy."""

    mode: Mode = "dry-run"
    below: float = Field(default=0.05, gt=0, le=1)
    sustained: Duration = Field(default=7200, ge=300)
    grace: Duration = Field(default=1800, ge=60)
    exempt: IdleExemptions = IdleExemptions()


class PreemptionPolicy(Model):
    """When running work gives way, and how much of it at most.

    mode: dry-run decides, records and says, and stops nobody. quota: for queues within their deserved quota.
    over_share: for queues below their fair share, from those above theirs; never for a lower priority.
    saturation: KAI's multiplier, how much more saturated the others must stay. wait: how long a workload
    waits before it may take. min_runtime: left alone after a start. cool_down: left alone after having been
    preempted. per_team, per_cluster: workloads stopped in an hour. lost_gpu_hours: work lost in a day.
    idle: None: nobody is asked whether he uses what he holds."""

    mode: Mode = "dry-run"
    targets: PreemptionModes = PreemptionModes()
    quota: bool = True
    over_share: bool = True
    saturation: float = Field(default=1.0, ge=1)
    wait: Duration = 60
    min_runtime: Duration = 600
    cool_down: Duration = 3600
    per_team: int = Field(default=10, ge=0)
    per_cluster: int = Field(default=50, ge=0)
    lost_gpu_hours: float = Field(default=500.0, ge=0)
    classes: tuple[PriorityClassPolicy, ...] = ()
    slos: tuple[SloPolicy, ...] = ()
    idle: IdleReclaimPolicy | None = None
