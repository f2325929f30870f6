"""Defines every setting of the accountant.

Error messages name the place of the faulty value (`gputally.server.config_loading`). Unknown keys are errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from accountant.core import periods
from accountant.core.errors import SecretsUnreadable
from accountant.core.periods import KnownTimezone
from accountant.wire.policy_models import Measure
from accountant.wire.usage_cost_and_job_models import LABEL_NAME
from gputally.base.errors import SettingsFault as SettingsFault
from gputally.server import config_loading
from gputally.server.config_loading import Duration, Model, bare_off
from gputally.server.loopback import is_loopback
from gputally.server.rate_and_connection_limits import ConnectionLimits


class InvoiceIssuer(Model):
    """Names in FOCUS exports. Keep them equal in all months, because readers group by them."""

    name: str = Field(default="GPU platform", min_length=1, max_length=200)
    """The name of the party that provides the service and issues the invoices."""
    billing_account: str = Field(default="gpu-cluster", min_length=1, max_length=200)
    """BillingAccountId: the account of the organisation to which all teams belong."""
    billing_account_name: str = Field(default="GPU cluster", min_length=1, max_length=200)
    """Name of that account."""
    host: str = Field(default="", max_length=200)
    """HostProviderName: the cloud or data centre of the GPUs; empty: not stated."""
    payment_days: int | None = Field(default=None, ge=0, le=366)
    """Days after the date of issue within which an invoice is to be paid; null: invoices state no date of payment."""

    def payable_by(self, issued: date | None) -> date | None:
        """The date by which an invoice is to be paid; None for a draft, and without a term."""
        return None if issued is None or self.payment_days is None else issued + timedelta(days=self.payment_days)


def _checked_address(text: str) -> str:
    """The text itself, if it has the form host:port. Raises ValueError otherwise."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"not an address: {text!r} (write host:port, for example 127.0.0.1:8080 or [::]:8080)")
    return text


Address = Annotated[str, AfterValidator(_checked_address)]
"""host:port; an IPv6 host in brackets."""
ENV_PREFIX = "GPUTALLY_ACCOUNTANT_"
MIB = 1024 * 1024


class Limits(Model):
    """Limits on the requests of one client and of all clients together."""

    body_bytes: int = Field(default=8 * MIB, ge=1024)
    """Largest request body as sent (compressed)."""
    decoded_bytes: int = Field(default=64 * MIB, ge=1024)
    """Largest request body after decompression."""
    inflight_bytes: int = Field(default=256 * MIB, ge=1024)
    """Memory for request bodies of all clients at one time, as received and decompressed; above it 503 with
    Retry-After. One client may use a quarter of it, but at least as much as the largest body needs."""
    read_seconds: float = Field(default=30.0, gt=0)
    """A client must send its whole body within this time."""
    body_bytes_per_second: int = Field(default=1024, ge=1)
    """A body that arrives more slowly than this, after the first five seconds, is rejected."""
    connections: int = Field(default=16_384, ge=1)
    """Open connections of all clients, fewer if the process may not open as many files; further connections are
    closed."""
    connections_by_address: int = Field(default=1_024, ge=1)
    """Open connections of one address."""
    header_seconds: float = Field(default=5.0, gt=0)
    """A client must finish its TLS handshake, and send a request's headers, within this time."""
    reviews_per_second: float = Field(default=5.0, gt=0)
    """Rate at which one address may send tokens that must be checked by the API server; above it 429 with
    Retry-After."""
    reviews_burst: int = Field(default=50, ge=1)
    """How many such tokens one address may send in a burst before the rate applies."""
    requests_per_second: float = Field(default=2_000.0, gt=0)
    """Sustained request rate of one token from one address; above it 429 with Retry-After."""
    burst: int = Field(default=4_000, ge=1)
    """Requests that one token may send in a burst from one address before the rate applies."""
    page_lines: int = Field(default=10_000, ge=1)
    """Maximum number of lines on one page of an answer."""
    pages_bytes: int = Field(default=320 * MIB, ge=0)
    """Memory for cached answers: the figures of HTML pages that take long to compute, and lists of several pages,
    compressed, while clients read them. If a list does not fit, each of its pages takes as long as the first, and a
    page is refused if the list has changed."""
    reads: int = Field(default=6, ge=1)
    """Queries and pages that are computed at one time. Further requests wait, at most a minute; above 256 waiting ones
    503 with Retry-After."""
    reads_by_caller: int = Field(default=3, ge=1)
    """How many of them one caller may have. Of one caller at most 64 requests wait; above it 429 with Retry-After."""
    documents: int = Field(default=2, ge=1)
    """Statements and reports that are made at one time, one of each caller; further requests wait likewise."""
    span_days: int = Field(default=1_100, ge=1)
    """Longest span of one query."""

    window_gpu_hours: int = Field(default=2_500_000, ge=1)
    """Size limit of one usage window: its hours times the GPUs. The window of the policy in force may exceed it."""
    question_gpu_hours: int = Field(default=1_000_000_000, ge=1)
    """Size limit of one query for usage, cost, jobs or a report: its hours times the GPUs times the number of group
    dimensions (a report counts as six). A calendar month of a statement or a report may exceed it."""

    def of_connections(self) -> ConnectionLimits:
        """The limits on the connections of one listening socket."""
        return ConnectionLimits(self.connections, self.connections_by_address, self.header_seconds)


def _parse_list(value: object) -> object:
    """Splits the comma-separated text of an environment variable; returns any other value unchanged."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class Quotas(Model):
    """What one sender may leave in the ledger for ever. An honest node stays far below: one with 16 GPUs of 7 MIG
    instances each and a thousand pods a day needs 16 GPUs, 112 parts, 4,000 holders and 80 MiB a day. `nodes` and
    `cluster_gpus` limit a whole cluster.

    Except `parts`, each allowance fills again evenly within a day. A record beyond one is quarantined as `over-quota`
    and never counts. An import has 400 times the allowance of a node, for each node that it names."""

    gpus: int = Field(default=64, ge=1)
    """GPUs that a node may report for the first time within a day. Cloud nodes that return under the same name with
    other GPUs need more than a node can hold at one time."""
    parts: int = Field(default=512, ge=1)
    """Parts (models and MIG instances) that one GPU may have had in all time."""
    holders: int = Field(default=24_000, ge=1)
    """Pods, steps of jobs, containers and processes that a node may name for the first time within a day."""
    bytes: int = Field(default=1024 * MIB, ge=MIB)
    """Bytes of records that a node may leave within a day, as the ledger keeps them. Above it, records are lost: not
    even the quarantine keeps their content. Above twice as many, 429."""
    outboxes: int = Field(default=100, ge=1)
    """Outboxes (spools) that a node may begin within a day; above it 429 with Retry-After, and the agent waits."""
    import_nodes: int = Field(default=10_000, ge=1)
    """Nodes that the imports of a cluster may name for the first time within a day; above it 429."""
    decisions: int = Field(default=2_000_000, ge=1)
    """Decisions that a caller may record within a day; above it 429 with Retry-After, and the controller waits. A
    thousand queues whose weights change every minute are 1,440,000."""
    acts: int = Field(default=10_000, ge=1)
    """Acts (corrections, closed months, price books, deliveries sent again and so on) and previews that an admin may
    ask for within a day; above it 429 with Retry-After."""
    policies: int = Field(default=20_000, ge=1)
    """Policies that may be put in force in all time; above it 409. Two a day for ten years are 7,300."""
    import_chunks: int = Field(default=20_000, ge=1)
    """Completed chunks that the imports of a cluster from one source may note in all time, without withdrawn ones;
    above it 409. Ten years by the day are 3,650."""
    nodes: int = Field(default=40_000, ge=1)
    """Nodes that the agents of a cluster may name for the first time within a day; above it 429 with Retry-After, and
    the agent waits. An issuer of another cluster signs tokens of any node, so it could invent nodes without end."""
    label_values: int = Field(default=500, ge=1)
    """Values of one exported label that the pods of a namespace may have within 31 days; `__other__` stands for
    further ones."""
    cluster_gpus: int = Field(default=400_000, ge=1)
    """GPUs that all nodes of a cluster together may report for the first time within a day: 20 for each node that a
    first installation of 20,000 nodes brings."""


class KaiUsage(Model):
    """The usage source for KAI-Scheduler's `connectionString`: Prometheus' query API on a separate port.

    KAI sends no credentials, so use a NetworkPolicy that admits only KAI's scheduler."""

    listen: Address
    """host:port to serve on."""
    hosts: Annotated[tuple[str, ...], BeforeValidator(_parse_list)] = ()
    """Public host names under which clients reach the port. Addresses and names of the cluster are always accepted."""
    measure: Measure = "allocated"
    """The unit of a queue's usage and of the capacity."""
    min_coverage: float = Field(default=0.98, ge=0, le=1)
    """Usage counts as known up to the latest instant up to which this share of the GPUs is metered."""
    stale_after: Duration = Field(default=900, gt=0)
    """If the newest usage is older than this, the query fails, and KAI keeps its previous usage."""
    plain_after: Duration = Field(default=86_400, gt=0)
    """If the newest usage is older than this, it is left out, and every queue gets its configured weight."""

    @model_validator(mode="after")
    def _check_order(self) -> KaiUsage:
        if self.plain_after < self.stale_after:
            raise config_loading.at(
                "kai_usage.plain_after", "plain_after is smaller than stale_after: make it equal or larger"
            )
        return self


class OpenCost(Model):
    """OpenCost's allocation API on a separate port, for its dashboards and exporters.

    Its clients send no credentials, and every client that reaches the port can read all costs, so use a NetworkPolicy
    that admits only those clients."""

    listen: Address
    """host:port to serve on."""
    hosts: Annotated[tuple[str, ...], BeforeValidator(_parse_list)] = ()
    """Public host names under which clients reach the port. Addresses and names of the cluster are always accepted."""


class JobMetrics(Model):
    """Series of jobs in /metrics. Users determine the number of jobs, so the number of series is limited."""

    most: int = Field(default=200, ge=0, le=10_000)
    """Number of jobs shown at a time; 0: none."""
    keep: Duration = Field(default=3_600, ge=0)
    """How long a job is shown after its end."""
    training_job_cost_usd: bool = False
    """Also export `training_job_cost_usd`, by GPU type; only with a price book in USD."""


class Kubernetes(Model):
    """The API server of the accountant's own cluster."""

    inventory: bool = False
    """Watch pods, their owners, namespaces and nodes."""
    cluster: str = Field(default="default", min_length=1, max_length=253)
    """Name of that cluster in the ledger."""
    kubeconfig: Path | None = None
    """A kubeconfig file for access from outside the cluster; without one, the pod's service account is used."""
    team_labels: Annotated[tuple[str, ...], BeforeValidator(_parse_list)] = ()
    """Further namespace labels that name the team, in order of precedence, after gputally.dev/team."""
    user_labels: Annotated[tuple[str, ...], BeforeValidator(_parse_list)] = ()
    """Further pod labels or annotations that name the user, in order of precedence, after gputally.dev/user."""

    @property
    def watched(self) -> str:
        """The cluster whose pods are read from an API server, also those that are on no node; "" for none."""
        return self.cluster if self.inventory else ""


def _parse_mapping(value: object) -> object:
    """Parses the text `name=value,…` of an environment variable; returns any other value unchanged."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError("not a mapping: write name=value, comma-separated")
    return {name.strip(): content.strip() for name, _, content in pairs}


LibraryProperties = Annotated[dict[str, str], BeforeValidator(_parse_mapping), Field(max_length=100)]
"""Properties that PyIceberg defines, by name."""
_SCHEMES: Final = ("s3", "gs", "abfs", "abfss")


def _store_address(value: object) -> object:
    text = str(value) if isinstance(value, Path) else value
    if isinstance(text, str) and "://" in text:
        scheme, _, location = text.partition("://")
        if scheme not in _SCHEMES or not location.strip("/"):
            raise ValueError(
                f"not an address of a store: {text!r} (write a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or "
                "abfs://CONTAINER@ACCOUNT/PREFIX)"
            )
    return text


StoreAddress = Annotated[str, BeforeValidator(_store_address), Field(min_length=1, max_length=2_000)]
"""A folder, or a prefix of an object store."""


class ObjectStorage(Model):
    """Access to the object store of the archive or the backups. Without properties, the environment determines it
    (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, a role of the pod, and so on)."""

    properties: LibraryProperties = {}  # noqa: RUF012 - pydantic copies a default
    """Properties of PyIceberg's file access, for example `s3.endpoint` and `s3.region`. Put secrets into the file
    `secrets` instead."""
    secrets: Path | None = None
    """YAML file with secret properties, for example `s3.secret-access-key`; never logged."""


def secret_properties(path: Path | None) -> dict[str, str]:
    """The properties in a secrets file; none if there is no file. Raises SecretsUnreadable, whose message names the
    file and no content."""
    if path is None:
        return {}
    try:
        properties = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SecretsUnreadable(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise SecretsUnreadable(f"{path}: the file is not YAML in UTF-8") from None
    if not isinstance(properties, dict) or not all(isinstance(name, str) for name in properties):
        raise SecretsUnreadable(f"{path}: write a mapping of properties, for example s3.access-key-id: …")
    return {name: str(value) for name, value in properties.items()}


class ArchiveSettings(Model):
    """Received records as Parquet files outside the ledger's volume. Agents keep records in their spool until they are
    archived."""

    to: StoreAddress
    """A folder on another volume than `data`, or `s3://`, `gs://`, `abfs://`."""
    every: Duration = Field(default=3_600, ge=1)
    """How often new records are written to the archive."""
    keep_rows: Duration | None = Field(default=None, ge=86_400)
    """Rows older than this are removed from the ledger file; their sums stay, and the rows can be read from the
    archive. None: never."""


class LeaderElection(Model):
    """One of several replicas serves the ledger; the others wait until it releases a Lease."""

    lease: str = Field(min_length=1, max_length=253)
    """Name of the Lease."""
    namespace: str = Field(min_length=1, max_length=63)
    """Namespace of the Lease."""
    identity: str = Field(default="", max_length=253)
    """Name of this replica in the Lease; empty: the host name and process id."""
    own_volume: bool = False
    """True: each replica has its own `data` folder, and a new leader rebuilds the ledger from the newest backup and the
    archive, which all replicas can read. False: all replicas share one `data` folder."""


class LakeCatalog(Model):
    """The Apache Iceberg catalog of the lake's tables."""

    type: Literal["sql", "rest", "glue", "hive"] = "sql"
    """`sql`: SQLite or PostgreSQL."""
    uri: str = Field(default="", max_length=2_000)
    """Address of the catalog, for example `postgresql+psycopg://gputally@db/lake`; empty with `sql`: a SQLite file in
    the warehouse."""
    name: str = Field(default="gputally", min_length=1, max_length=100)
    """Name of the catalog, if one database has several."""
    properties: LibraryProperties = {}  # noqa: RUF012 - pydantic copies a default
    """Further properties of PyIceberg, for example `s3.endpoint`. Put secrets into the file `secrets` instead."""


class Lake(Model):
    """Settled figures as Apache Iceberg tables, for a fleet of clusters and for other query engines."""

    warehouse: str = Field(min_length=1, max_length=2_000)
    """Location of the tables' files: a folder, `s3://`, `gs://` or `abfs://`."""
    catalog: LakeCatalog = LakeCatalog()
    """The catalog of the tables."""
    secrets: Path | None = None
    """YAML file with secret properties, for example `s3.secret-access-key`; never logged."""
    ledger: str = Field(default="", max_length=253)
    """Name of this accountant's rows in the lake; empty: the name of its cluster (`kubernetes.cluster`)."""
    every: Duration = Field(default=3_600, ge=60)
    """How often the current day and changed earlier days are written."""
    days_back: int = Field(default=45, ge=1, le=400)
    """Number of most recent days that are checked for changes every time; of the older days one is checked each time,
    in rotation."""
    keep_snapshots: Duration = Field(default=7 * 86_400, ge=3_600)
    """How long earlier versions of a table remain readable."""


class Backups(Model):
    """Complete, verified copies of the ledger."""

    to: StoreAddress | None = None
    """A folder, preferably on another volume, or `s3://`, `gs://`, `abfs://`; None: `backups` in the data folder."""
    every: Duration | None = Field(default=None, ge=60)
    """How often a backup is made automatically. None: only on request."""
    keep: int = Field(default=7, ge=1)
    """Maximum number of backups; a new one replaces the oldest."""


class Settings(Model):
    """The accountant's settings. Relative paths start at the working directory."""

    data: Path = Path("/var/lib/gputally")
    """Folder of the ledger; created if missing."""
    ledger: str = Field(default="ledger.duckdb", pattern=r"^[^/]+$")
    """Name of the ledger file in that folder."""
    listen: Address = "127.0.0.1:8080"
    """host:port to serve on; port 0 uses a free port."""
    auth: Annotated[Literal["tokens", "off"], BeforeValidator(bare_off)] = "tokens"
    """`off` gives every caller all permissions and is refused unless `listen` is a loopback address."""
    tokens: Path | None = None
    """File with hashed bearer tokens; read again when it changes."""
    open_metrics: bool = False
    """True: metrics that name teams, queues, namespaces and jobs need no token. False: they need a token with scope
    `read`."""
    hosts: Annotated[tuple[str, ...], BeforeValidator(_parse_list)] = ()
    """Public host names under which metrics with names need no token (`open_metrics`), besides that of `public_url`.
    Addresses and names of the cluster are always accepted."""
    metrics_token: Path | None = None
    """File with a bearer token of scope `read`, for Prometheus to read /metrics; read again when it changes."""
    timezone: KnownTimezone = "UTC"
    """IANA time zone of months, days and hours."""
    prices: Path | None = None
    """Price book; read again when it changes. Without one all time is unpriced, never free."""
    inventory: Path | None = None
    """YAML file with nodes, namespaces and planned maintenance; it takes precedence over the cluster."""
    kubernetes: Kubernetes = Kubernetes()
    """The API server of the accountant's own cluster."""
    callers: Path | None = None
    """Callers besides those in the token file: agents by their service accounts, people by their groups."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s?#]+$")] | None = None
    """Public URL of the pages, for links in messages and for the redirect after a sign-in."""
    controller_pages: Annotated[str, Field(pattern=r"^(/|https?://[^\s?#/]+/?)$")] | None = None
    """Where browsers reach the controller's pages, for the menu: a URL without a path, or `/` for the address of these
    pages, if a proxy sends `/shares` there to the controller."""
    session: Duration = Field(default=8 * 3_600, ge=60)
    """How long a sign-in is valid."""
    session_key: Path | None = None
    """File with the secret that signs sessions, 32 bytes or more; None: a secret is generated and stored in the data
    folder."""
    session_store: StoreAddress | None = None
    """A folder or a prefix of an object store (`object_storage`) that all replicas of `gputally fleet serve` share, in
    which they store the sessions that people ended. None: groups of a session there count for 15 minutes at most, so
    that a copied cookie ends within this time. An accountant stores them in its data folder or beside its archive."""
    tls_cert: Path | None = None
    """Certificate (PEM) for HTTPS; read again when it changes."""
    tls_key: Path | None = None
    """Private key of that certificate."""
    tls_client_ca: Path | None = None
    """CA certificates (PEM) for the client certificates that `callers` lists."""
    policy: Path | None = None
    """Policy file, for an accountant without fairshare; read again when it changes."""
    deliveries: Path | None = None
    """File that says which reports and notices are sent and where; read again when it changes."""
    exported_labels: Annotated[
        tuple[Annotated[str, Field(pattern=f"^{LABEL_NAME}$")], ...], BeforeValidator(_parse_list), Field(max_length=8)
    ] = ()
    """Labels of pods that are dimensions of usage and cost, for example `project`: `by=label:project`. They are kept
    from then on; nodes' agents send those that their own `pod_labels` name."""
    linger_ms: int = Field(default=10, ge=0, le=1_000)
    """How long a commit waits for more batches, to share one fsync."""
    checkpoint_seconds: Duration = Field(default=300, ge=1)
    """How often the write-ahead log is written into the ledger file."""
    refresh_seconds: Duration = Field(default=30, ge=1)
    """How often the inventory is read and the files above are checked for changes."""
    gpu_move_after: Duration = Field(default=3_600, ge=60)
    """After a node has been silent about a GPU for this long, another node may report that GPU (the card was moved)."""
    keep_decisions: Duration | None = Field(default=400 * 86_400, ge=86_400)
    """Decisions older than this are deleted from the ledger, with an archive only after they are archived. None: never.
    Statements and the audit trail do not use them."""
    grace_days: int = Field(default=5, ge=0, le=60)
    """How long after its end a month waits for late records before it can be closed without an acknowledgement."""
    correct_seconds: Duration = Field(default=3_600, ge=60)
    """How often closed months are checked for late records; differences become proposals."""
    correct_months: int = Field(default=12, ge=1, le=120)
    """Number of most recent closed months that are checked every time; of the older ones one is checked each time, in
    rotation."""
    issuer: InvoiceIssuer = InvoiceIssuer()
    """The issuer and the billing account in FOCUS exports."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    limits: Limits = Limits()
    quotas: Quotas = Quotas()
    archive: ArchiveSettings | None = None
    """Off by default: after a loss of the ledger's volume, agents send records again from their spools, as far as they
    still have them."""
    leader_election: LeaderElection | None = None
    """Off by default: a single replica."""
    lake: Lake | None = None
    """The lake into which this accountant publishes settled figures. Off by default."""
    backups: Backups = Backups()
    object_storage: ObjectStorage = ObjectStorage()
    job_metrics: JobMetrics = JobMetrics()
    """Costs of jobs in /metrics."""
    kai_usage: KaiUsage | None = None
    """The usage source for KAI-Scheduler. Off by default."""
    opencost: OpenCost | None = None
    """The API for OpenCost's clients. Off by default."""

    @model_validator(mode="after")
    def _check_dependencies(self) -> Settings:
        if self.auth == "off" and not is_loopback(self.host):
            raise config_loading.at(
                "auth",
                f"auth: off needs a loopback address, and {self.listen} can be reached from other machines: set listen "
                "to 127.0.0.1:8080, or auth to tokens",
            )
        if self.auth == "tokens" and self.tokens is None and self.callers is None:
            raise config_loading.at(
                "tokens", "no token file (set tokens: FILE, callers: FILE, or auth: off on a loopback address)"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise config_loading.at(
                "tls_key" if self.tls_key else "tls_cert", "tls_cert and tls_key go together: set both or neither"
            )
        if self.leader_election is not None and self.leader_election.own_volume:
            if self.archive is None:
                raise config_loading.at(
                    "archive", "leader_election.own_volume needs an archive that every replica reaches: set archive.to"
                )
            if self.backups.to is None:
                raise config_loading.at(
                    "backups", "leader_election.own_volume needs backups that every replica reaches: set backups.to"
                )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise config_loading.at("tls_client_ca", "client certificates need HTTPS: set tls_cert and tls_key")
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


def host_and_port(listen: str) -> tuple[str, int]:
    """The host and the port of an `Address`; an IPv6 host without its brackets."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def load(
    path: Path | None = None, environ: Mapping[str, str] = os.environ, flags: Mapping[str, object] | None = None
) -> Settings:
    """Reads and merges settings file, environment and flags (`gputally.server.config_loading`). Raises SettingsFault
    with a line per fault."""
    return config_loading.load_settings(Settings, ENV_PREFIX, path, environ, flags or {})
