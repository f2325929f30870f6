"""Which parts of a policy the form shows, in which words. Data."""

from __future__ import annotations

from fairshare.web.field import Field, Group
from fairshare.web.parts import BUDGETS, PREEMPTION, TARGETS

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
_DECAYS = (
    ("exact", "exact: the integral of the half-life"),
    ("slurm", "slurm: period by period, as Slurm does"),
)
_LAWS = (
    ("kai", "kai: KAI's own formula, n + k (n − U)"),
    ("deficit", "deficit: what is owed is repaid"),
    ("fairtree", "fairtree: Slurm's fair tree"),
    ("multifactor", "multifactor: Slurm's classic factor"),
)

GROUPS = (
    Group(
        "History",
        "Which past counts, and how strongly.",
        (
            Field(("window", "kind"), "Window", "choice", "", _KINDS),
            Field(("window", "size"), "Length", "duration", "for example 7d, 12h, 1h30m"),
            Field(("window", "half_life"), "Half-life", "duration", "usage that old counts half; empty: all the same"),
            Field(("window", "start"), "Boundaries from", "instant", "with the window tumbling: 2026-10-01T00:00:00Z"),
            Field(("window", "cron"), "Cron", "text", "with the window cron: minute hour day month weekday"),
            Field(("window", "decay"), "Decay", "choice", "", _DECAYS),
            Field(("window", "calc_period"), "Its period", "duration", "of Slurm's decay: PriorityCalcPeriod"),
            Field(("window", "gpu_weights"), "Weights of models", "yaml", "how much a GPU-second counts: H100: 2.5"),
            Field(("measure",), "Measure", "choice", "", _MEASURES),
            Field(("law",), "Law", "choice", "", _LAWS),
            Field(("k",), "k", "number", "how strongly history counts in the law kai; 0: not at all"),
        ),
    ),
    Group(
        "Bounds",
        "How far and how fast a published weight may move from the configured one.",
        (
            Field(("bounds", "min_multiplier"), "At least", "number", "times the configured weight"),
            Field(("bounds", "max_multiplier"), "At most", "number", "times the configured weight"),
            Field(("bounds", "max_step"), "Step", "number", "largest relative change in one cycle"),
            Field(("bounds", "deadband"), "Deadband", "number", "smaller relative changes are not published"),
            Field(("bounds", "hold_down"), "Hold-down", "duration", "no turning round sooner than this"),
            Field(("max_staleness",), "Staleness", "duration", "with older figures the last weights stay"),
            Field(("min_coverage",), "Coverage", "number", "with thinner figures the last weights stay; 1 is all"),
        ),
    ),
    Group(
        "The deficit law",
        "Read by the law deficit alone.",
        (
            Field(("deficit", "repay"), "Repay within", "duration", "in which a debt would be repaid at once"),
            Field(("deficit", "rate"), "Rate", "number", "most that a queue is moved off its share, of the pool"),
            Field(("deficit", "horizon"), "Horizon", "duration", "how far ahead pending work counts as demand"),
            Field(("deficit", "gain"), "Gain", "number", "how strongly who is off his due moves his weight"),
            Field(("deficit", "smoothing"), "Smoothing", "duration", "averaged over this time"),
            Field(("deficit", "reclaim_price"), "Its price", "number", "most taken from who has others preempted"),
            Field(("deficit", "price_knee"), "Its knee", "number", "evictions per GPU-hour that cost half of it"),
            Field(("deficit", "quiet"), "Quiet below", "number", "smaller differences of share move no weight"),
            Field(("turns", "min_turn"), "Shortest turn", "duration", "of a gang that no share admits"),
            Field(("turns", "ratio"), "Turn's weight", "number", "most, as a ratio to the others'; 0: no turns"),
            Field(("turns", "lump"), "Turns from", "number", "gangs from this part of the pool on"),
        ),
        folded=True,
    ),
    BUDGETS,
    PREEMPTION,
    TARGETS,
)  # fmt: skip

QUEUE = (
    Field(("name",), "Queue", "text"),
    Field(("parent",), "Under", "text", ""),
    Field(("deserved",), "Deserved", "number", "GPUs it has at any time; −1: unlimited"),
    Field(("weight",), "Weight", "number", "its part of what is left over, before history"),
    Field(("limit",), "Limit", "number", "GPUs it may hold at most; −1: none"),
    Field(("priority",), "Priority", "number", "higher is served first"),
    Field(("team",), "Team", "text", "who the usage is billed to"),
    Field(("refs",), "Refs", "list", "the scheduler's queues it is: kai:NAME, kueue:NAMESPACE/NAME …"),
)  # fmt: skip
SCALARS = tuple(field for group in GROUPS for field in group.fields)
