"""One accountant, composed: ledger, ingest, price book, policy, inventory, HTTP application.

The only place that knows all of them. `maintain` does what is due (files looked at, inventory read,
write-ahead log folded in); `start` does it in a thread, while the demo and the tests call it
themselves, at their own times. Closing is orderly: the ingest is flushed before the ledger is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import structlog
import uvicorn

from accountant import prices, yamlfile
from accountant.api import asgi
from accountant.api.app import create_app
from accountant.api.deps import Deps
from accountant.auth import Authenticator, Everybody, TokenFile
from accountant.bookkeeping import Bookkeeper
from accountant.compat import prometheus
from accountant.errors import AccountantError, InventoryError, LedgerFailed
from accountant.ingest import Ingest
from accountant.inventory import YamlInventory
from accountant.ledger import Facts, Inventory
from accountant.metrics import Metrics
from accountant.metrics_ledger import LedgerCollector
from accountant.prices import PriceBook
from accountant.settings import Settings
from accountant.store import open_ledger
from accountant.watched import Watched
from accountant.wire import Policy
from agent.clock import Clock
from agent.units import MS_PER_SECOND

T = TypeVar("T")
_PULSE_SECONDS = 1.0
"""How often the thread looks whether something is due."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than an agent's interval, so that its connection lasts."""
_DRAIN_SECONDS = 20
"""How long requests in flight may take to finish when the service stops."""


class CannotStart(AccountantError):
    """A folder, file or address that this process cannot use: one line, the place and the reason."""


class Service:
    """Owns the ledger from construction to `close`.

    listeners: applications of other programs' tongues (accountant.compat), each with the address to serve it on.
    over: set when the process should end, of its own accord (`failure`: only a restart helps) or because
    somebody set it. inventory, authenticator: None takes what the settings name. trial: the price book's file is
    tried out and not recorded. Raises AccountantError
    (CannotStart, InventoryError, LedgerLocked, LedgerDamaged, LedgerUnavailable) and
    agent.yamlfile.FileFault; nothing is left open then."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        inventory: Inventory | None = None,
        authenticator: Authenticator | None = None,
        *,
        trial: bool = False,
    ) -> None:
        self._trial = trial
        self.settings = settings
        self._clock = clock
        self._log = structlog.get_logger("accountant.service")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: LedgerFailed | None = None
        self.over = threading.Event()
        self._book = self._watch(settings.prices, prices.load)
        self._policy = self._watch(settings.policy, lambda path: yamlfile.load(path, Policy))
        if inventory is None and settings.inventory is not None:
            inventory = YamlInventory(settings.inventory)
        self._inventory = inventory
        now = clock.wall_ms()
        facts = inventory.read(now) if inventory is not None else Facts()
        authenticator = authenticator or self._authenticator()
        _writable(settings.data)
        self.ledger = open_ledger(settings.ledger_file, clock, month_zone=settings.timezone)
        try:
            self.books = Bookkeeper(self.ledger, clock, settings.timezone, settings.grace_days, settings.correct_months)
            self._take_prices()
            if self._policy is not None:
                self.ledger.put_policy(self._policy.current, now)
            self.ledger.observe(facts, now, self.books.closed_ms())
        except BaseException:
            self.ledger.close()
            raise
        self.ingest = Ingest(self.ledger, clock, settings.linger_ms, self.fail)
        metrics = Metrics()
        metrics.watch(LedgerCollector(self.ledger, self.book, settings, clock))
        self.app = create_app(
            Deps(settings, clock, self.ledger, self.ingest, authenticator, metrics, self.books, self.fail)
        )
        self.listeners = self._compatible(metrics)
        self._due = {
            what: clock.monotonic_ms() + seconds * MS_PER_SECOND
            for what, seconds in (
                ("refresh", settings.refresh_seconds),
                ("checkpoint", settings.checkpoint_seconds),
                ("correct", settings.correct_seconds),
            )
        }

    def book(self) -> PriceBook | None:
        """The price book in force."""
        return self.books.prices.current

    def _compatible(self, metrics: Metrics) -> tuple[tuple[asgi.App, str], ...]:
        kai = self.settings.kai_usage
        if kai is None:
            return ()
        source = prometheus.KaiUsageSource(self.ledger, self._clock, kai, prometheus.KaiMetrics(metrics.registry))
        return ((prometheus.create_app(source), kai.listen),)

    def start(self) -> None:
        """Maintain in a thread from now on, until `close`."""
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)
        self._thread.start()

    def maintain(self) -> None:
        """Do what is due by now. Faults are logged; the running versions stay in force."""
        if self._is_due("refresh", self.settings.refresh_seconds):
            self._refresh()
        if self._is_due("correct", self.settings.correct_seconds):
            booked = self.books.correct("accountant")
            if booked:
                self._log.info("corrections_booked", lines=len(booked), month=booked[0].booked_in)
        if self._is_due("checkpoint", self.settings.checkpoint_seconds):
            self.ledger.checkpoint()

    def fail(self, failure: LedgerFailed) -> None:
        """End the service: only another process can open the ledger again."""
        self.failure = failure
        self.over.set()

    def close(self) -> None:
        """Flush the ingest, fold the log into the file, let go of it. The app must be out of use."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.ingest.close()
        if self.failure is None:
            self.ledger.checkpoint()
        self.ledger.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(_PULSE_SECONDS):
            try:
                self.maintain()
            except LedgerFailed as failure:
                self.fail(failure)
                return
            except AccountantError as error:
                self._log.error("maintenance_failed", reason=str(error))

    def _is_due(self, what: str, every_seconds: int) -> bool:
        now = self._clock.monotonic_ms()
        if now < self._due[what]:
            return False
        self._due[what] = now + every_seconds * MS_PER_SECOND
        return True

    def _refresh(self) -> None:
        if self._book is not None and self._book.look():
            self._take_prices()
        if self._policy is not None and self._policy.look():
            version = self.ledger.put_policy(self._policy.current, self._clock.wall_ms())
            self._log.info("policy_taken_into_force", version=version.version)
        if self._inventory is not None:
            now = self._clock.wall_ms()
            try:
                self.ledger.observe(self._inventory.read(now), now, self.books.closed_ms())
                self._inventory.taken()
            except InventoryError as error:
                self._log.error("inventory_not_read", reason=str(error))

    def _take_prices(self) -> None:
        """The price book's file into force, where it says something new."""
        if self._book is None:
            return
        if self._trial:
            self.books.prices.try_out(self._book.current, self._clock.wall_ms())
            return
        taken = self.books.prices.take(self._book.current, "file", str(self.settings.prices), "", self._clock.wall_ms())
        if taken is not None:
            self._log.info("price_book_taken_into_force", version=taken.version)

    def _watch(self, path: Path | None, load: Callable[[Path], T]) -> Watched[T] | None:
        return None if path is None else Watched(path, load, self._stays)

    def _stays(self, faults: str) -> None:
        self._log.error("file_refused_running_version_stays", faults=faults.splitlines())

    def _authenticator(self) -> Authenticator:
        if self.settings.auth == "off" or self.settings.tokens is None:
            return Everybody()
        return TokenFile(self.settings.tokens, self._clock, self._stays)


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"data folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotStart(f"data folder {folder}: not writable by user {os.getuid()}")


class _Server(uvicorn.Server):
    """Says when it listens, so that nobody has to ask again and again."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises CannotStart."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(2048)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise CannotStart(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


@contextlib.contextmanager
def serve(app: asgi.App, host: str, port: int) -> Iterator[str]:
    """Serve the app in a thread and give its base URL; on leaving, stop accepting and let requests finish.

    port 0 takes a free one. Raises CannotStart."""
    bound = listen(host, port)
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
    )

    def run() -> None:
        try:
            server.run(sockets=[bound])
        finally:
            server.listening.set()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    server.listening.wait()
    address, actual_port = bound.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, f"[{address}]" if ":" in address else address)  # noqa: S104
    try:
        yield f"http://{name}:{actual_port}"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
