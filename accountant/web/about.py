"""Which decisions are about a job: schedulers name their gangs after it.

`<job>`, or `<job>-<what they add>`; KAI puts `pg-` before it, Kueue the kind of the job. A name that merely begins
alike is another job's. A victim's record lists its pods, which tells exactly; what claims GPUs has none yet, and is
taken for the job with the longest name that fits. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from accountant.progress import JobKey
from accountant.web import posted
from accountant.wire import Decision


def gangs_of(key: JobKey) -> tuple[str, ...]:
    """How the names of its gangs begin: namespace/name."""
    return tuple(f"{key.namespace}/{name}" for name in _names(key.job))


def about(
    decisions: Iterable[Decision], key: JobKey, pods: Collection[str], siblings: Collection[str]
) -> list[Decision]:
    """Those about the job, in their order. pods: the names of its own. siblings: jobs of its cluster and namespace, as
    keys have them."""
    mine = {f"{key.namespace}/{name}" for name in pods}
    jobs = sorted({key.job, *siblings}, key=lambda job: (-len(_name(job)), job != key.job, job))
    return [one for one in decisions if _is_about(one, key, mine, jobs)]


def _is_about(one: Decision, key: JobKey, pods: Collection[str], jobs: Iterable[str]) -> bool:
    """jobs: the longest name first, the job itself before others of its name."""
    named = one.subject.partition("/")[2]
    if named == f"{key.namespace}/{_name(key.job)}":
        return True
    victims = [name for name in posted.listed(one.inputs.get("pods")) if isinstance(name, str)]
    if victims:
        return any(name in pods for name in victims)
    begin = f"{key.namespace}/"
    if not named.startswith(begin):
        return False
    return next((job for job in jobs if _is_of(named.removeprefix(begin), job)), None) == key.job


def _is_of(gang: str, job: str) -> bool:
    return any(gang == name or gang.startswith(f"{name}-") for name in _names(job))


def _names(job: str) -> tuple[str, ...]:
    kind, name = job.partition("/")[0], _name(job)
    return name, f"pg-{name}", f"{kind.lower()}-{name}"


def _name(job: str) -> str:
    """Without its kind."""
    return job.partition("/")[2] or job
