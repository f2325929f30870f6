"""Defines every setting of the agent with its bounds and sources, and what each privilege level hides.

Flags, environment names (`GPUTALLY_AGENT_` + upper case), `--print-config` and the error messages are derived from one
frozen Struct. An error message names the place of the fault: `file:line`, the variable or the flag. No setting is
silently ignored.

A privilege level is the access that the operator granted (the chart's `agent.privilege`). At the level `allocation`,
the agent ignores the driver's process numbers, because they are the host's and would match unrelated processes in the
agent's own process table. The agent also uses readings that the level does not promise, if the driver gives them. If
the driver refuses a reading that the level promises, the agent reports the refusal."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from msgspec import Meta

from agent.core.readings import SOLE, DeviceReading, PrivilegeLevel, Unavailable
from gputally.base import yaml_file
from gputally.base.errors import AgentError
from gputally.base.units import BUCKET_MS

ENV_PREFIX = "GPUTALLY_AGENT_"
KUBELET = "kubelet"
SCHEDULERS = "schedulers"
"""The word of `gpu_sharing` for every installed scheduler whose pods hold GPUs for others."""
API_OFF = "off"
"""The value of `api_url` that disables the use of the API server."""
_BUCKET_S = BUCKET_MS // 1000


class SettingsError(AgentError):
    """The settings are invalid. The message has one line per fault, each with its place."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of the agent. The name of a duration contains its unit."""

    cluster: Annotated[
        str, Meta(min_length=1, max_length=253, description="Name of the cluster this node belongs to.")
    ] = "default"
    node: Annotated[
        str, Meta(max_length=253, description="Name of this node; empty: the variable NODE_NAME, else the host name.")
    ] = ""
    url: Annotated[str, Meta(description="Base URL of the accountant; empty: records stay in the spool.")] = ""
    token_file: Annotated[
        str, Meta(description="File with the bearer token, read again when it changes; empty: no token is sent.")
    ] = ""
    ca_file: Annotated[
        str,
        Meta(
            description="PEM file of the CAs to trust for the accountant's certificate, read again when it changes; "
            "empty: the system's CAs."
        ),
    ] = ""
    client_cert: Annotated[
        str,
        Meta(description="PEM file of the agent's client certificate, read again when it changes; empty: none."),
    ] = ""
    client_key: Annotated[str, Meta(description="PEM file of the client certificate's key.")] = ""
    spool: Annotated[
        str, Meta(description="Folder of the outbox; empty: /var/lib/gputally for root, else the user's state folder.")
    ] = ""
    spool_max_mib: Annotated[
        int, Meta(ge=1, le=1_048_576, description="Largest size of the outbox, MiB; a full outbox refuses new records.")
    ] = 512
    spool_max_days: Annotated[
        int,
        Meta(
            ge=1,
            le=366,
            description="Age of the oldest undelivered record above which new records are refused, days.",
        ),
    ] = 7
    interval_s: Annotated[
        int, Meta(ge=1, le=_BUCKET_S, description="Length of an interval, seconds; must divide 900.")
    ] = 60
    sample_s: Annotated[
        float, Meta(gt=0, le=5, description="Time between two readings, seconds; the driver keeps samples for 10.")
    ] = 2.0
    ship_s: Annotated[float, Meta(gt=0, le=3600, description="Time between two uploads without failures, seconds.")] = (
        30.0
    )
    batch_rows: Annotated[int, Meta(ge=1, le=100_000, description="Largest number of records in one upload.")] = 2_000
    batch_kib: Annotated[
        int, Meta(ge=1, le=65_536, description="Largest payload of one upload before compression, KiB.")
    ] = 1_000
    timeout_s: Annotated[float, Meta(gt=0, le=300, description="How long an upload waits for an answer, seconds.")] = (
        30.0
    )
    grace_s: Annotated[
        float, Meta(ge=0, le=600, description="How long a stopping agent tries to deliver its records, seconds.")
    ] = 20.0
    month_zone: Annotated[
        str, Meta(description="Time zone of the billing month; intervals are cut at its month edges.")
    ] = "UTC"
    accounting: Annotated[
        bool,
        Meta(
            description="Switch on the driver's accounting mode, which misses no busy time of a process. The mode "
            "applies to the whole host and stays on; the agent needs CAP_SYS_ADMIN."
        ),
    ] = False
    privilege: Annotated[
        PrivilegeLevel,
        Meta(
            description="Access on Kubernetes: allocation (the kubelet's device list and the GPUs), process (also "
            "the host's processes: hostPID), profiling (also the driver's profiling counters)."
        ),
    ] = "allocation"
    gpu_readers: Annotated[
        str,
        Meta(
            description="Readers of the GPUs, separated by commas, each as NAME or NAME=PLACE, by their names in "
            "gputally plugins. A later one adds what the earlier ones lack."
        ),
    ] = "nvml"
    holders: Annotated[
        str,
        Meta(
            description="Source of the holders of GPUs, as NAME or NAME=PLACE: kubelet, processes (without Kubernetes: "
            "jobs of batch systems, containers and processes), pods=FILE, jobs=FOLDER (HPC job files, one per GPU), or "
            "one of another package (gputally plugins)."
        ),
    ] = "kubelet"
    gpu_sharing: Annotated[
        str,
        Meta(
            description="Sharing systems of this node, separated by commas, by their names in gputally plugins: "
            "schedulers whose pods hold GPUs for others (schedulers: all of them), and systems of virtual devices; "
            "empty: none."
        ),
    ] = SCHEDULERS
    kubelet_socket: Annotated[
        str,
        Meta(
            description="The kubelet's PodResources socket; mount its folder, because the kubelet recreates the socket."
        ),
    ] = "/var/lib/kubelet/pod-resources/kubelet.sock"
    api_url: Annotated[str, Meta(description="URL of the API server; empty: this cluster's; off: none is used.")] = ""
    api_token_file: Annotated[
        str, Meta(description="File with the token for api_url, read again when it changes; empty: no token is sent.")
    ] = ""
    api_ca_file: Annotated[
        str, Meta(description="PEM file of the CAs to trust for api_url; empty: the system's CAs.")
    ] = ""
    pod_labels: Annotated[
        str, Meta(description="Pod labels that are sent to the accountant, separated by commas; `*` matches any text.")
    ] = "team,project,cost-center,app.kubernetes.io/*,kai.scheduler/*,kueue.x-k8s.io/*"
    release_s: Annotated[
        float, Meta(gt=0, le=86_400, description="How long the driver stays closed after SIGUSR1, seconds.")
    ] = 60.0
    simulated: Annotated[str, Meta(description="Scenario file of a simulated node, instead of NVML.")] = ""
    proc: Annotated[str, Meta(description="Where the host's process table is mounted.")] = "/proc"
    pod_logs: Annotated[
        str, Meta(description="Where the kubelet's log folders are mounted, whose names contain the names of pods.")
    ] = "/var/log/pods"
    release_file: Annotated[
        str,
        Meta(description="While this file exists the agent keeps the driver closed, so that MIG can be reconfigured."),
    ] = ""
    dcgm_names: Annotated[
        bool,
        Meta(description="Also export metrics under dcgm-exporter's names; each pod has its own share of a GPU."),
    ] = False
    listen: Annotated[str, Meta(description="Address of /metrics, /livez and /readyz.")] = "0.0.0.0"  # noqa: S104 - a scraper comes from elsewhere
    port: Annotated[
        int, Meta(ge=0, le=65_535, description="Port of /metrics, /livez and /readyz; 0: any free one.")
    ] = 9401
    hosts: Annotated[
        str,
        Meta(
            description="Public host names under which clients reach the port, separated by commas. Addresses, names "
            "of the cluster and this machine's own names are always accepted."
        ),
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Lowest level that is logged.")
    ] = "info"

    @property
    def sharing_systems(self) -> frozenset[str]:
        """The sharing systems that `gpu_sharing` names; `schedulers` stands for every one that is installed."""
        named = frozenset(comma_separated(self.gpu_sharing))
        if SCHEDULERS not in named:
            return named
        from gputally.kubernetes.pod_queue_labels import reserving_schedulers

        return (named - {SCHEDULERS}) | reserving_schedulers()

    @property
    def sees_processes(self) -> bool:
        """True if the agent sees the host's processes, so that the driver's process numbers match its process table."""
        return not self.on_kubernetes or self.privilege != "allocation"

    @property
    def on_kubernetes(self) -> bool:
        """True if the kubelet is the source of the holders, which is the default."""
        return names_kubelet(self.holders) and not self.simulated

    def node_name(self, environ: Mapping[str, str]) -> str:
        """Return `node`, or the name that Kubernetes or the host gives this machine."""
        return self.node or environ.get("NODE_NAME", "") or socket.gethostname()

    def spool_path(self, environ: Mapping[str, str], *, root: bool) -> Path:
        """Return the path of the outbox file. root: True if the agent runs as root."""
        if self.spool:
            return Path(self.spool) / "outbox.sqlite"
        if root:
            return Path("/var/lib/gputally/outbox.sqlite")
        state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '.')}/.local/state"
        return Path(state) / "gputally" / "outbox.sqlite"


def names() -> tuple[str, ...]:
    return AgentSettings.__struct_fields__


@cache
def _annotations() -> Mapping[str, Any]:
    """Return the annotated types of all settings. They are cached, because evaluating them takes as long as the rest of
    the argument parsing."""
    return get_type_hints(AgentSettings, include_extras=True)


def description(name: str) -> str:
    return next(meta.description for meta in _annotations()[name].__metadata__ if isinstance(meta, Meta)) or ""


def is_switch(name: str) -> bool:
    """Return True if the setting's flag takes no value."""
    return bool(_annotations()[name].__origin__ is bool)


def metavar(name: str) -> str:
    """Return the placeholder of the setting's value in --help."""
    return {int: "N", float: "SECONDS"}.get(_annotations()[name].__origin__, "TEXT")


def load(config: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> AgentSettings:
    """Merge the settings of the file, the environment and the flags; the later ones override the earlier ones.

    flags: the given values by setting name.

    Raises SettingsError, one line per fault."""
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    faults: list[str] = []

    def add(place: str, name: str, value: object, *, strict: bool) -> None:
        try:
            values[name] = msgspec.convert(value, _annotations()[name], strict=strict)
            places[name] = place
        except msgspec.ValidationError as error:
            faults.append(f"{place}: {name}: {str(error).removesuffix(' - at `$`')}")

    for place, name, value in _from_file(config, faults):
        add(place, name, value, strict=True)
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name in names():
                add(variable, name, environ[variable], strict=False)
            else:
                faults.append(f"{variable}: unknown setting {name!r}")
    for name, value in flags.items():
        add(flag(name), name, value, strict=False)
    faults += _contradictions(values, places)
    if faults:
        raise SettingsError("\n".join(faults))
    return msgspec.convert(values, AgentSettings)


def flag(name: str) -> str:
    """Return the flag of a setting: that of `interval_s` is `--interval`."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def names_kubelet(holders: object) -> bool:
    """Return whether the setting `holders` names the kubelet."""
    return isinstance(holders, str) and holders.partition("=")[0].strip() == KUBELET


def comma_separated(text: str) -> tuple[str, ...]:
    """Return the parts of a text that are separated by commas."""
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


def render(settings: AgentSettings) -> str:
    """Return the settings as a YAML file, each below its description."""
    lines: list[str] = []
    for name in names():
        value = msgspec.json.encode(getattr(settings, name)).decode()  # JSON scalars are YAML scalars
        lines += [f"# {description(name)}", f"{name}: {value}"]
    return "\n".join(lines) + "\n"


def _from_file(config: Path | None, faults: list[str]) -> list[tuple[str, str, object]]:
    """Return (place, name, value) of each known setting in the file, and add the file's faults to `faults`."""
    if config is None:
        return []
    try:
        document = yaml_file.read(config)
    except yaml_file.FileFault as fault:
        faults += fault.faults
        return []
    if document.data is None:
        return []
    if not isinstance(document.data, dict):
        faults.append(f"{document.place(())}: expected settings as `name: value`")
        return []
    known: list[tuple[str, str, object]] = []
    for key, value in document.data.items():
        if key in names():
            known.append((document.place((key,)), key, value))
        else:
            faults.append(f"{document.place((str(key),))}: unknown setting {key!r}")
    return known


def _contradictions(values: Mapping[str, object], places: Mapping[str, str]) -> list[str]:
    """Return the faults that the types of the settings cannot express, such as contradictions between settings."""
    faults: list[str] = []
    interval = values.get("interval_s")
    if isinstance(interval, int) and _BUCKET_S % interval:
        faults.append(f"{places['interval_s']}: interval_s: {interval} does not divide {_BUCKET_S}")
    zone = values.get("month_zone")
    if isinstance(zone, str):
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            faults.append(f"{places['month_zone']}: month_zone: unknown time zone {zone!r}")
    elsewhere = not names_kubelet(values.get("holders", KUBELET))
    if elsewhere and values.get("simulated"):
        faults.append(f"{places['holders']}: holders: cannot be combined with simulated; choose one")
    if bool(values.get("client_cert")) != bool(values.get("client_key")):
        present = "client_cert" if values.get("client_cert") else "client_key"
        faults.append(f"{places[present]}: {present}: client_cert and client_key need each other; set both")
    if (
        values.get("accounting")
        and not (elsewhere or values.get("simulated"))
        and values.get("privilege", "allocation") == "allocation"
    ):
        faults.append(f"{places['accounting']}: accounting: needs privilege process or profiling")
    return faults


_BUSY = ("pod-busy-on-shared-gpus", "how busy each pod is on a GPU that several share")
_MEMORY = ("pod-memory-on-shared-gpus", "how much memory each pod uses on a GPU that several share")
_UNALLOCATED = ("processes-outside-kubernetes", "which processes use a GPU without an allocation")
_MIG = ("mig-utilisation", "how busy MIG instances are, unless an exporter reports it")
_ALL = (_BUSY, _MEMORY, _UNALLOCATED, _MIG)

_UNSEEN: dict[PrivilegeLevel, tuple[tuple[str, str], ...]] = {
    "allocation": _ALL,
    "process": (_MIG,),
    "profiling": (),
}


def unseen(level: PrivilegeLevel, devices: Sequence[DeviceReading] = ()) -> tuple[str, ...]:
    """Return the labels of the figures that an agent with this privilege level cannot see.

    devices: readings of this agent. The label of a figure that they contain is left out, and that of a figure that they
        lack is added."""
    hidden = {label for label, _ in _UNSEEN[level]}
    instances = [instance for device in devices for instance in device.instances]
    if instances:
        hidden.discard(_MIG[0])
        if any(isinstance(instance.busy_us, Unavailable) for instance in instances):
            hidden.add(_MIG[0])
    for device in devices:
        if device.unlisted:
            hidden |= {_BUSY[0], _MEMORY[0], _UNALLOCATED[0]}
        for holder in device.holders:
            if isinstance(holder.busy_us, Unavailable) and holder.busy_us != SOLE:
                hidden.add(_BUSY[0])
            if isinstance(holder.memory_mib, Unavailable):
                hidden.add(_MEMORY[0])
    return tuple(label for label, _ in _ALL if label in hidden)


def privilege_text(level: PrivilegeLevel) -> str:
    """Return in words what an agent with this privilege level cannot see, for the log."""
    return "; ".join(text for _, text in _UNSEEN[level]) or "nothing"
