"""The policy's targets: the published language of where weights go, scheduler by scheduler.

Frozen pydantic models, part of `accountant.wire.Policy`. How a weight becomes a field of a scheduler's objects is
`fairshare.adapters`'; here is only what can be written down.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from accountant.terms import Model, bare_off

Apply = Literal["dry-run", "enforce"]
"""dry-run: ask the API server what it would say, and write nothing."""


class KaiTarget(Model):
    """mode weight: publish `overQuotaWeight`; the shard's kValue has to be 0. usage: KAI reads its history from
    the accountant, weights are left alone. off: leave KAI alone. Never both: history counts once.
    endpoint: where KAI should ask for usage, held against its shards' `connectionString` in mode usage."""

    mode: Annotated[Literal["weight", "usage", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    endpoint: str | None = Field(default=None, pattern="^https?://[^/]+", max_length=500)


class KueueTarget(Model):
    """mode weight: publish `fairSharing.weight`. config: namespace/name of the ConfigMap with Kueue's own
    configuration, read to know whether it listens to weights."""

    mode: Annotated[Literal["weight", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    config: str = Field(default="kueue-system/kueue-manager-config", pattern="^[^/]+/[^/]+$")


class VolcanoTarget(Model):
    """mode: what Volcano's active plugin reads. weight: proportion. deserved: capacity. hierarchy: drf with
    hierarchy. config: namespace/name of the scheduler's ConfigMap, read to know which plugin is active."""

    mode: Annotated[Literal["weight", "deserved", "hierarchy", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    config: str = Field(default="volcano-system/volcano-scheduler-configmap", pattern="^[^/]+/[^/]+$")


class KubeSchedulerTarget(Model):
    """mode extender: shares of queues with `policy:` refs act through the extender. off: leave those out."""

    mode: Annotated[Literal["extender", "off"], BeforeValidator(bare_off)] = "extender"


class RunaiTarget(Model):
    """mode weight: publish `overQuotaWeight` of projects and departments through Run:ai's API. url: its control
    plane. node_pool: of refs that name none. cluster: Run:ai's id of the cluster; None: it has but one."""

    mode: Annotated[Literal["weight", "off"], BeforeValidator(bare_off)] = "weight"
    apply: Apply = "dry-run"
    url: str | None = Field(default=None, pattern="^https?://[^/]+", max_length=500)
    node_pool: str = Field(default="default", min_length=1, max_length=253)
    cluster: str | None = Field(default=None, max_length=100)


class Targets(Model):
    """Where weights go. A target that no queue's refs name is left alone, whatever its mode."""

    kai: KaiTarget = KaiTarget()
    kueue: KueueTarget = KueueTarget()
    volcano: VolcanoTarget = VolcanoTarget()
    kube_scheduler: KubeSchedulerTarget = KubeSchedulerTarget()
    runai: RunaiTarget = RunaiTarget()
