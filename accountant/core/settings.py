"""Defines every setting of the accountant.

Every fault names its place (`gputally.server.config_models`). Unknown keys are faults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from accountant.core import periods
from accountant.core.errors import SecretsUnreadable
from accountant.wire.policy_models import Measure
from gputally.base.errors import SettingsFault as SettingsFault
from gputally.server import config_models
from gputally.server.config_models import Duration, Model, bare_off
from gputally.server.request_handling import ConnectionLimits
from gputally.server.tokens_and_grants import is_loopback


class Issuer(Model):
    """Names in FOCUS exports, the same in every month: who reads them groups by them."""

    name: str = Field(default="GPU platform", min_length=1, max_length=200)
    """Who provides the service and issues the invoices."""
    billing_account: str = Field(default="gpu-cluster", min_length=1, max_length=200)
    """BillingAccountId: the account of the organisation that all teams belong to."""
    billing_account_name: str = Field(default="GPU cluster", min_length=1, max_length=200)
    """Its name."""
    host: str = Field(default="", max_length=200)
    """HostProviderName: the cloud or the data centre that the GPUs stand in; empty: not said."""


ENV_PREFIX = "GPUTALLY_ACCOUNTANT_"
MIB = 1024 * 1024


class Limits(Model):
    """Bounds on what one client, and all of them together, may ask for."""

    body_bytes: int = Field(default=8 * MIB, ge=1024)
    """Largest request body as sent (compressed)."""
    decoded_bytes: int = Field(default=64 * MIB, ge=1024)
    """Largest request body after decompression."""
    inflight_bytes: int = Field(default=256 * MIB, ge=1024)
    """Bodies held in memory at one time, as far as they have arrived and after decompression, all clients together;
    above it 503 with Retry-After. One client has a quarter of it, or what one body may take where that is more."""
    read_seconds: float = Field(default=30.0, gt=0)
    """A client has to send its whole body within this time."""
    body_bytes_per_second: int = Field(default=1024, ge=1)
    """Slower than this, after the first five seconds, a body is given up."""
    connections: int = Field(default=16_384, ge=1)
    """Open connections of all clients; fewer where the process may not open as many files. One too many is closed."""
    connections_by_address: int = Field(default=1_024, ge=1)
    """The same of one address."""
    header_seconds: float = Field(default=5.0, gt=0)
    """A client has to finish its TLS handshake, and send a request's headers, within this time."""
    reviews_per_second: float = Field(default=5.0, gt=0)
    """How often one address may bring a token that only the API server can judge; above it 429 with Retry-After."""
    reviews_burst: int = Field(default=50, ge=1)
    """How many such tokens one address may bring at once before the rate counts."""
    requests_per_second: float = Field(default=2_000.0, gt=0)
    """Sustained rate of one token from one address; above it 429 with Retry-After."""
    burst: int = Field(default=4_000, ge=1)
    """Requests one token may make at once from one address before the rate counts."""
    page_lines: int = Field(default=10_000, ge=1)
    """Most lines of one page of an answer."""
    pages_bytes: int = Field(default=64 * MIB, ge=0)
    """Memory for answers of several pages, compressed, while their pages are read. A page of one that found no
    room takes as long as the first; where the answer is another one by then, it is refused."""
    span_days: int = Field(default=1_100, ge=1)
    """Longest span of one question."""

    window_gpu_hours: int = Field(default=2_500_000, ge=1)
    """What one window may add up: its hours times the GPUs. The window of the policy in force may add up more."""
    question_gpu_hours: int = Field(default=1_000_000_000, ge=1)
    """What one question about usage, cost, jobs or a report may add up: its hours times the GPUs times the dimensions
    of its groups (a report counts as six). A calendar month of a statement or a report may add up more."""

    def of_connections(self) -> ConnectionLimits:
        """What a listener needs of them."""
        return ConnectionLimits(self.connections, self.connections_by_address, self.header_seconds)


class KaiUsage(Model):
    """The usage source for KAI-Scheduler's `connectionString`: Prometheus' query API on a port of its own.

    Its client sends no credentials: let a NetworkPolicy admit KAI's scheduler alone."""

    listen: str
    """host:port to serve on."""
    measure: Measure = "allocated"
    """What a queue's usage and the capacity are measured in."""
    min_coverage: float = Field(default=0.98, ge=0, le=1)
    """Usage is known up to the latest instant that this share of the GPUs has reached."""
    stale_after: Duration = Field(default=900, gt=0)
    """Usage older than this is an error, on which KAI keeps the usage it has."""
    plain_after: Duration = Field(default=86_400, gt=0)
    """Usage older than this is left out: every queue gets its configured weight."""

    @field_validator("listen")
    @classmethod
    def _address(cls, text: str) -> str:
        return address(text)

    @model_validator(mode="after")
    def _ordered(self) -> KaiUsage:
        if self.plain_after < self.stale_after:
            raise config_models.at("kai_usage.plain_after", "plain_after is smaller than stale_after")
        return self


class OpenCost(Model):
    """OpenCost's allocation API on a port of its own, for its dashboards and exporters.

    Its clients send no credentials, and every client that reaches the port reads all costs: let a NetworkPolicy admit
    those clients alone."""

    listen: str
    """host:port to serve on."""

    @field_validator("listen")
    @classmethod
    def _address(cls, text: str) -> str:
        return address(text)


class JobMetrics(Model):
    """Series of jobs in /metrics: their number is up to those who submit jobs, so it is bounded."""

    most: int = Field(default=200, ge=0, le=10_000)
    """Jobs shown at once; 0: none."""
    keep: Duration = Field(default=3_600, ge=0)
    """How long after its end a job is shown."""
    training_job_cost_usd: bool = False
    """Also as `training_job_cost_usd`, by GPU type; only with a price book in USD."""


def _listed(value: object) -> object:
    """The environment has no lists: there they are comma-separated."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class Kubernetes(Model):
    """The API server that this accountant asks about its own cluster."""

    inventory: bool = False
    """Keep pods, their owners, namespaces and nodes up to date by watches."""
    cluster: str = Field(default="default", min_length=1, max_length=253)
    """Name of that cluster in the ledger."""
    kubeconfig: Path | None = None
    """How to reach it from outside; without one, as the pod's own service account."""
    team_labels: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Further namespace labels that name the team, best first, after gputally.dev/team."""
    user_labels: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Further pod labels or annotations that name who runs it, best first, after gputally.dev/user."""


def _mapping(value: object) -> object:
    """The environment has no mappings: there they are `name=value`, comma-separated."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError("write name=value, comma-separated")
    return {name.strip(): of.strip() for name, _, of in pairs}


_SCHEMES: Final = ("s3", "gs", "abfs", "abfss")


def _store_address(value: object) -> object:
    text = str(value) if isinstance(value, Path) else value
    if isinstance(text, str) and "://" in text:
        scheme, _, place = text.partition("://")
        if scheme not in _SCHEMES or not place.strip("/"):
            raise ValueError(
                "write a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, abfs://CONTAINER@ACCOUNT/PREFIX"
            )
    return text


StoreAddress = Annotated[str, BeforeValidator(_store_address), Field(min_length=1, max_length=2_000)]
"""A folder, or a prefix of an object store."""


class ObjectStorage(Model):
    """How the object store is reached that the archive or the backups are in. Without properties: as the environment
    says (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, a role of the pod, and so on)."""

    properties: Annotated[dict[str, str], BeforeValidator(_mapping)] = Field(default={}, max_length=100)
    """Properties of PyIceberg's file access, for example `s3.endpoint` and `s3.region`. No secrets: those belong into
    the file `secrets`."""
    secrets: Path | None = None
    """File (YAML) with properties that are secret, for example `s3.secret-access-key`; never logged."""

    def secret_properties(self) -> dict[str, str]:
        """Raises SecretsUnreadable."""
        return secret_properties(self.secrets)


def secret_properties(path: Path | None) -> dict[str, str]:
    """The properties in a file of secrets. Raises SecretsUnreadable, which names the file and no content."""
    if path is None:
        return {}
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SecretsUnreadable(f"{path}: cannot be read: {type(error).__name__}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise SecretsUnreadable(f"{path}: write a mapping of properties, for example s3.access-key-id: …")
    return {name: str(value) for name, value in found.items()}


class Archive(Model):
    """What was received, in Parquet away from the ledger's volume: agents then keep their spool until it is there."""

    to: StoreAddress
    """A folder on another volume than `data`, or `s3://`, `gs://`, `abfs://`."""
    every: Duration = Field(default=3_600, ge=1)
    """How often what came since is written there."""
    keep_rows: Duration | None = Field(default=None, ge=86_400)
    """Rows older than this leave the ledger file; sums stay, rows are read from the archive. None: never."""


class LeaderElection(Model):
    """One of several replicas serves the ledger; the others wait until it lets go of a Lease."""

    lease: str = Field(min_length=1, max_length=253)
    """Name of the Lease."""
    namespace: str = Field(min_length=1, max_length=63)
    """Where it is."""
    identity: str = Field(default="", max_length=253)
    """What the Lease calls this replica; empty: the name of the host and the process."""
    own_volume: bool = False
    """Each replica has a `data` folder of its own, and a new leader rebuilds the ledger from the newest backup and the
    archive, which all of them reach. False: all of them share one `data` folder."""


class LakeCatalog(Model):
    """Where the lake's tables are registered: a catalog of Apache Iceberg."""

    type: Literal["sql", "rest", "glue", "hive"] = "sql"
    """`sql`: SQLite or PostgreSQL."""
    uri: str = Field(default="", max_length=2_000)
    """Address of the catalog, for example `postgresql+psycopg://gputally@db/lake`; empty with `sql`: a SQLite file in
    the warehouse."""
    name: str = Field(default="gputally", min_length=1, max_length=100)
    """Name of the catalog, where several are on one database."""
    properties: Annotated[dict[str, str], BeforeValidator(_mapping)] = Field(default={}, max_length=100)
    """Further properties of PyIceberg, for example `s3.endpoint`. No secrets: those belong into the file `secrets`."""


class Lake(Model):
    """Settled figures as Apache Iceberg tables, for a fleet of clusters and for other engines."""

    warehouse: str = Field(min_length=1, max_length=2_000)
    """Where the tables' files are: a folder, `s3://`, `gs://` or `abfs://`."""
    catalog: LakeCatalog = LakeCatalog()
    """Where the tables are registered."""
    secrets: Path | None = None
    """File (YAML) with properties that are secret, for example `s3.secret-access-key`; never logged."""
    ledger: str = Field(default="", max_length=253)
    """Name of this accountant's rows in the lake; empty: that of its cluster (`kubernetes.cluster`)."""
    every: Duration = Field(default=3_600, ge=60)
    """How often the running day and what changed before it are written."""
    days_back: int = Field(default=45, ge=1, le=400)
    """How many days, from today back, are looked at for changes every time; of older ones one, in turn."""
    keep_snapshots: Duration = Field(default=7 * 86_400, ge=3_600)
    """How long earlier versions of a table stay readable."""


class Backups(Model):
    """Whole copies of the ledger, each verified."""

    to: StoreAddress | None = None
    """A folder, best on another volume, or `s3://`, `gs://`, `abfs://`; None: `backups` in the data folder."""
    every: Duration | None = Field(default=None, ge=60)
    """How often one is made by itself. None: only when asked for."""
    keep: int = Field(default=7, ge=1)
    """How many there are at most; the oldest go when another is made."""


class Settings(Model):
    """The accountant's settings. Paths are taken from the working directory."""

    data: Path = Path("/var/lib/gputally")
    """Folder of the ledger; made if missing."""
    ledger: str = Field(default="ledger.duckdb", pattern=r"^[^/]+$")
    """The ledger's file in it."""
    listen: str = "127.0.0.1:8080"
    """host:port to serve on; port 0 takes a free one."""
    auth: Annotated[Literal["tokens", "off"], BeforeValidator(bare_off)] = "tokens"
    """`off` lets every caller do everything and is refused unless `listen` is a loopback address."""
    tokens: Path | None = None
    """File of bearer tokens (hashed); read again when it changes."""
    open_metrics: bool = False
    """Name teams, queues, namespaces and jobs in /metrics also without a token. False: what names them needs one with
    scope `read`."""
    metrics_token: Path | None = None
    """File with a bearer token of scope `read`, for the Prometheus that reads /metrics; read again when it changes."""
    timezone: str = "UTC"
    """IANA zone that months, days and hours are local to."""
    prices: Path | None = None
    """Price book; read again when it changes. Without one everything is unpriced, never free."""
    inventory: Path | None = None
    """Nodes, namespaces and planned maintenance (YAML); what it says beats what the cluster says."""
    kubernetes: Kubernetes = Kubernetes()
    """The API server of the accountant's own cluster."""
    callers: Path | None = None
    """Who else is let in, beside the token file: agents by their service accounts, people by their groups."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s?#]+$")] | None = None
    """Where people reach the pages, for links in letters and for the way back from a sign-in."""
    session: Duration = Field(default=8 * 3_600, ge=60)
    """How long a sign-in lasts."""
    session_key: Path | None = None
    """Secret that sessions are signed with, 32 bytes or more; None: one is made, and kept in the data folder."""
    tls_cert: Path | None = None
    """Certificate (PEM) to serve HTTPS with; taken anew when it changes."""
    tls_key: Path | None = None
    """Its key."""
    tls_client_ca: Path | None = None
    """Authorities (PEM) of client certificates that `callers` lists."""
    policy: Path | None = None
    """Policy file, for an accountant without fairshare; read again when it changes."""
    deliveries: Path | None = None
    """Which reports and notices are sent, and where; read again when it changes."""
    linger_ms: int = Field(default=10, ge=0, le=1_000)
    """How long a commit waits for more batches to share its fsync."""
    checkpoint_seconds: Duration = Field(default=300, ge=1)
    """How often the write-ahead log is folded into the ledger file."""
    refresh_seconds: Duration = Field(default=30, ge=1)
    """How often the inventory is read and the files above are looked at."""
    gpu_move_after: Duration = Field(default=3_600, ge=60)
    """Silence of a node about a GPU after which another node may report that GPU: the card was moved."""
    keep_decisions: Duration | None = Field(default=400 * 86_400, ge=86_400)
    """Decisions older than this leave the ledger, with an archive once it has them. None: never. Statements and audit
    trail need none of them."""
    grace_days: int = Field(default=5, ge=0, le=60)
    """How long after its end a month waits for late records before it closes without an acknowledgement."""
    correct_seconds: Duration = Field(default=3_600, ge=60)
    """How often late facts about closed months are looked for; what is found waits as a proposal."""
    correct_months: int = Field(default=12, ge=1, le=120)
    """How many closed months, from the newest back, are looked at for that every time; of older ones one, in turn."""
    issuer: Issuer = Issuer()
    """The issuer and the billing account in FOCUS exports."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    limits: Limits = Limits()
    archive: Archive | None = None
    """Off by default: what the ledger's volume loses, agents send again from their spools, as far as they have it."""
    leader_election: LeaderElection | None = None
    """Off by default: this is the only replica."""
    lake: Lake | None = None
    """Off by default: publish settled figures for a fleet."""
    backups: Backups = Backups()
    object_storage: ObjectStorage = ObjectStorage()
    job_metrics: JobMetrics = JobMetrics()
    """What jobs cost, in /metrics."""
    kai_usage: KaiUsage | None = None
    """Answer KAI-Scheduler's usage queries. Off by default."""
    opencost: OpenCost | None = None
    """Answer OpenCost's clients. Off by default."""

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        periods.zone(name)
        return name

    @field_validator("listen")
    @classmethod
    def _address(cls, text: str) -> str:
        return address(text)

    @model_validator(mode="after")
    def _guarded(self) -> Settings:
        if self.auth == "off" and not is_loopback(self.host):
            raise config_models.at(
                "auth", f"auth: off needs a loopback address, and {self.listen} can be reached from elsewhere"
            )
        if self.auth == "tokens" and self.tokens is None and self.callers is None:
            raise config_models.at(
                "tokens", "no token file (set tokens: FILE, callers: FILE, or auth: off on a loopback address)"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise config_models.at("tls_key" if self.tls_key else "tls_cert", "tls_cert and tls_key go together")
        if self.leader_election is not None and self.leader_election.own_volume:
            if self.archive is None:
                raise config_models.at("archive", "leader_election.own_volume needs an archive that all reach")
            if self.backups.to is None:
                raise config_models.at("backups", "leader_election.own_volume needs backups.to that all reach")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise config_models.at("tls_client_ca", "client certificates need tls_cert and tls_key")
        return self

    @property
    def host(self) -> str:
        return host_and_port(self.listen)[0]

    @property
    def port(self) -> int:
        return host_and_port(self.listen)[1]

    @property
    def zone(self) -> ZoneInfo:
        return periods.zone(self.timezone)

    @property
    def ledger_file(self) -> Path:
        return self.data / self.ledger

    @property
    def backups_to(self) -> str:
        return self.backups.to or str(self.data / "backups")

    def as_yaml(self) -> str:
        """The settings in force, in the form of the settings file."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def address(text: str) -> str:
    """The text itself where it is host:port. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"not an address: {text!r} (write host:port, for example 127.0.0.1:8080 or [::]:8080)")
    return text


def host_and_port(listen: str) -> tuple[str, int]:
    """The host and the port of an `address`; IPv6 without its brackets."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def load(
    path: Path | None = None, environ: Mapping[str, str] = os.environ, flags: Mapping[str, object] | None = None
) -> Settings:
    """Read and merge the three layers (`gputally.server.config_models`). Raises SettingsFault with a line per fault."""
    return config_models.load_settings(Settings, ENV_PREFIX, path, environ, flags or {})
