"""The groups of the form for targets, budgets and preemption. Data, as `fairshare.web.fields`, which shows them."""

from __future__ import annotations

from fairshare.web.field import Field, Group

_MODES = (
    ("off", "off: not at all"),
    ("dry-run", "dry-run: decided and recorded, nobody is stopped"),
    ("enforce", "enforce: done"),
)
_APPLY = (("dry-run", "dry-run: printed, not written"), ("enforce", "enforce: written to the cluster"))
_WEIGHT = (("weight", "weight: published to its queues"), ("off", "off"))


def _target(name: str, title: str, modes: tuple[tuple[str, str], ...], *more: Field) -> tuple[Field, ...]:
    return (
        Field(("targets", name, "mode"), title, "choice", "", modes),
        Field(("targets", name, "apply"), f"{title} applies", "choice", "", _APPLY),
        *more,
    )


TARGETS = Group(
    "Targets",
    "The schedulers that are told, and whether what is decided is written or only printed.",
    (
        *_target(
            "kai", "KAI", (_WEIGHT[0], ("usage", "usage: KAI asks for it itself"), _WEIGHT[1]),
            Field(("targets", "kai", "endpoint"), "KAI asks at", "text", "with the mode usage: where"),
        ),
        *_target(
            "kueue", "Kueue", _WEIGHT,
            Field(("targets", "kueue", "config"), "Kueue's configuration", "text", "namespace/name"),
        ),
        *_target(
            "volcano", "Volcano",
            (
                _WEIGHT[0], ("deserved", "deserved: its capacity plugin"), ("hierarchy", "hierarchy: its drf"),
                _WEIGHT[1],
            ),
            Field(("targets", "volcano", "config"), "Volcano's configuration", "text", "namespace/name"),
        ),
        Field(
            ("targets", "kube_scheduler", "mode"), "kube-scheduler", "choice", "",
            (("extender", "extender: it asks"), _WEIGHT[1]),
        ),
        *_target(
            "runai", "Run:ai", _WEIGHT,
            Field(("targets", "runai", "url"), "Run:ai at", "text", "https://…"),
            Field(("targets", "runai", "node_pool"), "Run:ai's node pool", "text"),
            Field(("targets", "runai", "cluster"), "Run:ai's cluster", "text", "its id, where there are several"),
        ),
    ),
    folded=True,
)  # fmt: skip

BUDGETS = Group(
    "Budgets",
    "What a queue or a team may spend in a month, in money (with a currency) or in GPU-hours.",
    (
        Field(
            ("budgets",), "Budgets", "yaml",
            "one a line: - {name: vision-eur, team: vision, limit: 20000, currency: EUR, thresholds: [0.8, 1.0]}",
        ),
    ),
)  # fmt: skip

PREEMPTION = Group(
    "Preemption",
    "When running work gives way, and how much of it at most.",
    (
        Field(("preemption", "mode"), "Preemption", "choice", "", _MODES),
        Field(("preemption", "quota"), "For quotas", "switch", "queues within what they deserve may take it back"),
        Field(("preemption", "over_share"), "For shares", "switch", "queues below their share, from those above it"),
        Field(("preemption", "saturation"), "Saturation", "number", "how much more saturated the others must stay"),
        Field(("preemption", "wait"), "Waits first", "duration", "before a workload may take"),
        Field(("preemption", "min_runtime"), "Left alone", "duration", "after a start"),
        Field(("preemption", "cool_down"), "Cool-down", "duration", "after having been preempted"),
        Field(("preemption", "per_team"), "Most of a team", "number", "workloads stopped in an hour"),
        Field(("preemption", "per_cluster"), "Most of all", "number", "workloads stopped in an hour"),
        Field(("preemption", "lost_gpu_hours"), "Most lost", "number", "GPU-hours of work in a day"),
        Field(("preemption", "targets"), "Per target", "yaml", "at most what the mode allows: kai: enforce"),
        Field(("preemption", "classes"), "Priority classes", "yaml", "- {name: urgent, value: 1000, preempts: true}"),
        Field(
            ("preemption", "slos"), "Latencies", "yaml",
            "- {name: chat, queue: inference, query: 'histogram_quantile(…)', above: 2s, sustained: 5m, gpus: 4}",
        ),
        Field(
            ("preemption", "idle"), "Idle GPUs", "yaml",
            "{mode: dry-run, below: 0.05, sustained: 2h, grace: 30m}; empty: nobody is asked",
        ),
    ),
    folded=True,
)  # fmt: skip
