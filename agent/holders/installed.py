"""What the installed manifests of holders say about pods and processes, for the agent's own sources.

A package that cannot be used is logged once, and left out."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache

from agent.holders.protocol import SEAM, HolderPlugin, JobCgroups, VirtualDevices
from gputally.base.plugins import plugins, usable
from gputally.kubernetes.pod_queue_labels import reserving_schedulers

_log = logging.getLogger("agent.holders.installed")
_JOB_ID = r"[A-Za-z0-9][A-Za-z0-9_.@\[\]+-]{0,63}"


@cache
def installed() -> Mapping[str, HolderPlugin]:
    """Return the manifests by name."""
    for one in plugins(SEAM, HolderPlugin):
        if one.fault:
            _log.warning(
                "a source of holders is left out",
                extra={"holders": one.name, "package": one.package, "reason": one.fault},
            )
    return usable(SEAM, HolderPlugin)


@cache
def virtual_devices() -> Mapping[str, VirtualDevices]:
    """Return how each system names its virtual devices, by the system's name."""
    return {name: one.parts for name, one in installed().items() if one.parts is not None}


@cache
def device_resources() -> frozenset[str]:
    """Return the resources by which the kubelet names virtual devices."""
    return frozenset(parts.devices for parts in virtual_devices().values())


@cache
def sharing_systems() -> frozenset[str]:
    """Return the names that the setting `gpu_sharing` can have: of systems of virtual devices, and of schedulers whose
    pods hold GPUs for others."""
    return frozenset({*virtual_devices(), *reserving_schedulers()})


@cache
def job_paths() -> re.Pattern[str]:
    """Return the pattern of control groups of jobs, with the groups (job, step), of which one pair is set."""
    found = [one.jobs for one in installed().values() if one.jobs is not None]
    return re.compile("|".join(map(_job_path, found)) or r"(?!)", re.MULTILINE)


def job_ending(job: str) -> str:
    """Return the command that ends a job, one for each batch system that is known."""
    commands = sorted({one.jobs.cancel for one in installed().values() if one.jobs is not None and one.jobs.cancel})
    return " or ".join(f"{command} {job}" for command in commands) or f"end job {job}"


def _job_path(jobs: JobCgroups) -> str:
    folders = "|".join(re.escape(folder).replace(r"\*", "[^/:]*") for folder in jobs.folders)
    job, begin = re.escape(jobs.job), re.escape(jobs.step)
    step = rf"(?:/{begin}(\w+))?" if begin else "()"
    return rf"^(?:\d+:[^:]*:)?(?:/[^/:]+\.slice)*/(?:{folders})/{job}({_JOB_ID})(?=[/\n]|\Z){step}"
