"""Defines every setting of the controller.

Each fault names its place: `file:line`, the variable (`GPUTALLY_FAIRSHARE_` + upper case) or the option. Settings that
affect weights are in the policy file instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import yaml
from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from gputally.kubernetes.scheduler_plugins import own_schedulers
from gputally.server import config_loading
from gputally.server.config_loading import Duration, Model
from gputally.server.loopback import is_loopback

ENV_PREFIX = "GPUTALLY_FAIRSHARE_"


class CommonSettings(Model):
    """The controller's settings, to which manifests of schedulers add. Paths are relative to the working directory."""

    policy: Path
    """The policy file; read again when it changes. A faulty version leaves the previous one in force."""
    url: str = "http://127.0.0.1:8080"
    """Base URL of the accountant."""
    token_file: Path | None = None
    """File with the bearer token for the accountant; read at every request."""
    ca_file: Path | None = None
    """PEM file of the CAs to trust for the accountant's certificate; none: the system's."""
    accountants: Path | None = None
    """File with the accountants of other clusters whose usage the policy may count (`usage.clusters`); read at the
    start. Requires `cluster`."""
    objects: str = "kubernetes"
    """`kubernetes`, or a YAML file with Kubernetes objects, for a trial without a cluster."""
    cluster: str = Field(default="", max_length=253)
    """Name of this cluster in the ledger, as reported by its agents: usage of other clusters in the same accountant
    does not count. Empty: everything in the ledger belongs to this cluster."""
    kubeconfig: Path | None = None
    """A kubeconfig file to use instead of the pod's service account and the default kubeconfig."""
    dry_run: bool = False
    """True: publish no weight, whatever the policy says; conditions and events are still written."""
    interval: Duration = Field(default=60, ge=1)
    """Time between two cycles."""
    listen: str = "0.0.0.0:9402"
    """host:port of /livez, /readyz and /metrics; port 0 uses a free port."""
    hosts: tuple[str, ...] = ()
    """Public host names under which clients reach `listen` and `extender_listen`. Addresses and names of the cluster
    are always accepted."""
    extender_listen: str = ""
    """host:port of the kube-scheduler's extender, for example 0.0.0.0:9403; empty: none."""
    extender_certificate: Path | None = None
    """Certificate (PEM) to serve the extender with TLS, together with `extender_key`."""
    extender_key: Path | None = None
    extender_client_authority: Path | None = None
    """CA (PEM): the extender answers only clients with a certificate of it."""
    pages_listen: str = ""
    """host:port of the HTML pages, for example 0.0.0.0:9404; empty: none."""
    pages_tokens: Path | None = None
    """File with hashed bearer tokens (like the accountant's) for the pages: scope `read` to view, `policy` to change.
    Without it and `pages_callers`, the pages may only listen on a loopback address."""
    pages_callers: Path | None = None
    """Callers file, like the accountant's; both may use the same one. People sign in to the pages through its issuers
    with a `login`, and its grants determine permissions: `read` to view, `policy` to change. Requires
    `pages_public_url` and `pages_session_key`."""
    pages_public_url: str = Field(default="", pattern=r"^(https?://[^\s?#]+)?$")
    """Public URL of the pages; sign-in returns to `/sign-in/done` below it."""
    pages_session: Duration = Field(default=8 * 3_600, ge=60)
    """How long a sign-in is valid."""
    pages_session_key: Path | None = None
    """File with the secret that signs sessions, 32 bytes or more, the same for all replicas."""
    pages_certificate: Path | None = None
    """Certificate (PEM) to serve the pages with TLS, together with `pages_key`."""
    pages_key: Path | None = None
    pages_apply: str = Field(default="", pattern="^(file|configmap:[a-z0-9.-]+/[a-z0-9.-]+)?$")
    """Where the form may save the policy: `file`, or `configmap:NAMESPACE/NAME`, mounted as the file. Empty: nowhere;
    leave it empty if the policy is in version control."""
    pages_memory_mib: int = Field(default=768, ge=128)
    """Memory of a preview's process; one preview runs at a time."""
    pages_accountant: str = Field(default="", pattern=r"^(/|https?://[^\s?#/]+/?)?$")
    """Where browsers reach the accountant's pages, for the menu: a URL without a path, or `/` for the address of these
    pages, if a proxy sends everything but `/shares` there to the accountant. People then sign in at the accountant, and
    both read sessions with the same key."""
    prometheus: str = ""
    """Base URL of the Prometheus server with the latencies of the policy's `slos`; empty: none is watched."""
    prometheus_token_file: Path | None = None
    """File with the bearer token for Prometheus; read at every request."""
    watch_pods: bool = True
    """Watch pods that request GPUs: sizes of gangs, label queues and the extender need them."""
    lease: str = "gputally-fairshare"
    """Name of the Lease, in `status_namespace`, for the leader election among replicas; empty: no election."""
    identity: str = ""
    """Name of this replica in the Lease; empty: host name and process id."""
    status_namespace: str = "gputally"
    """Namespace of the ConfigMap with the conditions; empty: none is written."""
    status_name: str = "gputally-fairshare"
    log_level: Level = "info"

    @field_validator("hosts", mode="before")
    @classmethod
    def _hosts(cls, value: object) -> object:
        """Split the comma-separated text of an environment variable."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("listen", "extender_listen", "pages_listen")
    @classmethod
    def _address(cls, text: str, info: ValidationInfo) -> str:
        if not text and info.field_name != "listen":
            return text
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise ValueError(f"not an address: {text!r} (write host:port, for example 0.0.0.0:9402)")
        return text

    @model_validator(mode="after")
    def _pages(self) -> Self:
        guarded = self.pages_tokens is not None or self.pages_callers is not None
        if self.pages_listen and not guarded and not is_loopback(address(self.pages_listen)[0]):
            reason = f"{self.pages_listen} can be reached from elsewhere: set pages_tokens or pages_callers"
            raise config_loading.at("pages_listen", reason)
        if self.pages_callers is not None and not (self.pages_public_url and self.pages_session_key):
            raise config_loading.at("pages_callers", "goes together with pages_public_url and pages_session_key")
        if (self.pages_certificate is None) != (self.pages_key is None):
            raise config_loading.at(
                "pages_key" if self.pages_key else "pages_certificate", "pages_certificate and pages_key go together"
            )
        return self

    @property
    def host(self) -> str:
        return address(self.listen)[0]

    @property
    def port(self) -> int:
        return address(self.listen)[1]

    def as_yaml(self) -> str:
        """Return the settings in force, in the form of the settings file."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def file(self, name: str) -> Path | None:
        """Return the setting of a scheduler's manifest (`SchedulerPlugin.files`)."""
        found: Path | None = getattr(self, name)
        return found


if TYPE_CHECKING:
    ControllerSettings = CommonSettings
else:
    ControllerSettings = create_model(
        "ControllerSettings",
        __base__=CommonSettings,
        __module__=__name__,
        **{
            each.name: (Path | None, Field(default=None, description=each.help))
            for scheduler in own_schedulers()
            for each in scheduler.files
        },
    )


def address(text: str) -> tuple[str, int]:
    """Split a valid `host:port` into host and port."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def load(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> ControllerSettings:
    """Read and merge settings file, environment and flags (`gputally.server.config_loading`).

    flags: only the options that the user gave. Raises SettingsFault."""
    return config_loading.load_settings(ControllerSettings, ENV_PREFIX, path, environ, flags)


Level = Literal["debug", "info", "warning", "error"]
