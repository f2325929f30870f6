"""Maps a process id to a pod, a job's step or a container through its control group, and a pod's uid to its name.

The path of a control group determines its holder: the job and step of a batch system that it names, otherwise the pod,
otherwise the container. Of nested pods, the holder is the first one that this node's kubelet knows, or else the
outermost one. A process without any of them is its own holder. Jobs and processes also have a user. The root of the
process table is an argument (`/host/proc` in a container).

The start time of a process distinguishes it from a later one with the same number. `ProcessTable` remembers holders,
because a process that just ended has no control group any more.

The kubelet creates a folder `/var/log/pods/NAMESPACE_NAME_UID/` for every pod, and `PodLogs` reads the pods' names from
the names of these folders. For a static pod, UID is the id in its control group, not the uid of the API object. Outside
Kubernetes there are no such folders, which is not a fault. The module does not know GPUs."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from agent.holders.installed import job_paths
from agent.wire import JOB, Holder
from gputally.base.units import MS_PER_SECOND
from gputally.base.untrusted_text import as_name

MAX_FILE_BYTES = 64 * 1024
MAX_REMEMBERED = 4_096

# Not anchored, because prefixes differ by runtime, driver and namespace. Source: kubelet cgroup names (cgroupfs and
# systemd drivers; the latter writes '_' for '-'). A static pod's uid has 32 hex digits (its config hash).
_POD = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])"
)
_CONTAINER = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])")
_RUNTIME = re.compile(r"(docker|libpod|cri-containerd|crio|containerd)[-/:](?:conmon-)?(?=[0-9a-f]{64})")
_RUNTIME_NAMES = {"libpod": "podman", "cri-containerd": "containerd", "crio": "cri-o"}
_SHORT_ID = 12


class PodMatch(msgspec.Struct, frozen=True):
    """A pod in the path of a control group. container_id: the container that follows in the path; "" if none does."""

    uid: str
    container_id: str


def pods_in(cgroup: str) -> tuple[PodMatch, ...]:
    """Return the pods in the text of /proc/PID/cgroup, the outermost first."""
    pods: dict[str, PodMatch] = {}
    for line in cgroup.splitlines():
        matches = list(_POD.finditer(line))
        for i, match in enumerate(matches):
            until = matches[i + 1].start() if i + 1 < len(matches) else len(line)
            container = _CONTAINER.search(line, match.end(), until)
            uid = match.group(1).replace("_", "-")
            pods.setdefault(uid, PodMatch(uid, container.group(1) if container else ""))
    return tuple(pods.values())


def container_in(cgroup: str) -> tuple[str, str] | None:
    """Return (runtime, id) of the innermost container in the text of /proc/PID/cgroup; None if there is none. The
    runtime is "" if the path does not name it."""
    for line in cgroup.splitlines():
        ids = _CONTAINER.findall(line)
        if ids:
            runtimes = _RUNTIME.findall(line)
            runtime = runtimes[-1] if runtimes else ""
            return _RUNTIME_NAMES.get(runtime, runtime), ids[-1]
    return None


def holder_in(cgroup: str, known_pods: Collection[str] = ()) -> Holder | None:
    """Return the holder of a control group; None for a process outside pods, jobs and containers.

    cgroup: the text of /proc/PID/cgroup.
    known_pods: uids of the pods that this node's kubelet knows. Of nested pods, the first known one is the holder, or
        else the outermost one."""
    if found := job_paths().search(cgroup):
        job, step = (*(part for part in found.groups() if part is not None), "")[:2]
        return Holder(kind=JOB, uid=job, name=f"job {job}", container=step)
    pods = pods_in(cgroup)
    if pods:
        pod = next((p for p in pods if p.uid in known_pods), pods[0])
        return Holder(kind="pod", uid=pod.uid, container=pod.container_id[:_SHORT_ID])
    container = container_in(cgroup)
    if container:
        runtime, container_id = container
        return Holder(kind="container", uid=container_id, namespace=runtime, name=container_id[:_SHORT_ID])
    return None


_MPS_SERVER = "nvidia-cuda-mps-server"[:15]
"""Name of an MPS server's process, which the kernel truncates to 15 characters."""


class ProcessTable:
    """Finds the holders of processes. root: the host's process table, usually /proc."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._remembered: dict[int, tuple[str, Holder]] = {}
        self._users: dict[str, str] = {}

    def holder(self, pid: int, known_pods: Collection[str] = (), *, same: bool = False) -> Holder | None:
        """Return the holder of a process. For a process that has ended, return the holder that an earlier call found;
        None if there was no earlier call.

        known_pods: see `holder_in`.
        same: True if the process has used a GPU since the last call, so that the number belongs to the same process."""
        known = self._remembered.get(pid)
        if same and known is not None:
            return known[1]
        start = self._start_time(pid)
        if known is not None and start in ("", known[0]):
            return known[1]
        if not start:
            return None
        holder = holder_in(self._read(pid, "cgroup"), known_pods) or self._process(pid, start)
        if holder.kind == JOB:
            holder = msgspec.structs.replace(holder, namespace=self._job_user(holder.uid, pid))
        while len(self._remembered) >= MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[pid] = (start, holder)
        return holder

    def is_mps_server(self, pid: int) -> bool:
        """Return whether the process is a server of CUDA's Multi-Process Service."""
        return self._read(pid, "comm").strip() == _MPS_SERVER

    def _process(self, pid: int, start: str) -> Holder:
        name = self._read(pid, "comm").strip() or f"pid {pid}"
        return Holder(kind="process", uid=f"{pid}:{start}", namespace=self._user(pid), name=name)

    def _job_user(self, job: str, pid: int) -> str:
        """Return the user of a job: the user of its first process, so that all its processes have one holder."""
        while len(self._users) >= MAX_REMEMBERED:
            del self._users[next(iter(self._users))]
        return self._users.setdefault(job, self._user(pid))

    def _start_time(self, pid: int) -> str:
        """Return the start time of a process: field 22 of /proc/PID/stat; "" if the process is gone. The fields are
        counted after the last ')', because the name of the program may contain any character."""
        fields = self._read(pid, "stat").rpartition(")")[2].split()
        return fields[19] if len(fields) > 19 else ""

    def _user(self, pid: int) -> str:
        uid = re.search(r"^Uid:\s+(\d+)", self._read(pid, "status"), re.MULTILINE)
        if uid is None:
            return ""
        try:
            return as_name(pwd.getpwuid(int(uid.group(1))).pw_name)  # its bytes need be no UTF-8
        except (KeyError, OverflowError):
            return uid.group(1)

    def _read(self, pid: int, name: str) -> str:
        """Return the text of one file of a process; "" if the process is gone. The method uses descriptors, which are
        faster than file objects, because it runs for every process and sample."""
        try:
            descriptor = os.open(f"{self._root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return os.read(descriptor, MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError:  # it ended between the two calls
            return ""
        finally:
            os.close(descriptor)


RESCAN_MS = 10 * MS_PER_SECOND
MAX_PODS = 10_000


class PodName(NamedTuple):
    namespace: str
    name: str


class PodLogs:
    """Finds the names of pods by uid, from the kubelet's log folders. root: usually /var/log/pods."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[str, PodName] = {}
        self._next_ms = 0

    def names(self, at_ms: int) -> dict[str, PodName]:
        """Return the name of every pod that has a folder, by uid. The folders are listed at most every ten seconds."""
        if at_ms >= self._next_ms:
            self._next_ms = at_ms + RESCAN_MS
            self._names = self._scan()
        return self._names

    def _scan(self) -> dict[str, PodName]:
        names: dict[str, PodName] = {}
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    parts = entry.name.split("_")  # namespace, name and uid never contain an underscore
                    if len(parts) == 3 and all(parts) and entry.name.isprintable() and len(names) < MAX_PODS:
                        names[parts[2]] = PodName(parts[0], parts[1])
        except OSError:
            return {}
        return names
