"""A PostgreSQL server on the loopback in a folder of its own, from Debian's package."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.real.programs import free_ports, running, wait_until


@dataclass(frozen=True)
class Postgres:
    """user: a superuser; any password is accepted."""

    port: int
    user: str = "postgres"

    def uri(self, database: str = "postgres") -> str:
        """Return SQLAlchemy's address for psycopg, as PyIceberg takes it."""
        return f"postgresql+psycopg://{self.user}:any@127.0.0.1:{self.port}/{database}"

    def jdbc(self, database: str = "postgres") -> str:
        return f"jdbc:postgresql://127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> None:
        """Create an empty database and return its name."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"'.encode())

    @property
    def _dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user={self.user} dbname=postgres connect_timeout=2"

    def answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self._dsn):
            return True
        return False


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a server until the block ends. Root runs it as the user of Debian's package, because PostgreSQL refuses
    root."""
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    user = "postgres" if os.geteuid() == 0 else None
    # Not in pytest's folder, which only its owner may enter.
    folder = Path(tempfile.mkdtemp(prefix="gputally-postgres-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        data, log = folder / "data", folder / "postgres.log"
        (port,) = free_ports(1)
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"],
            check=True, capture_output=True, user=user, cwd=folder,
        )  # fmt: skip
        command = [
            str(programs / "postgres"), "-D", str(data), "-p", str(port), "-k", str(folder), "-c", "fsync=off",
            "-c", "listen_addresses=127.0.0.1",
        ]  # fmt: skip
        server = Postgres(port)
        with running(command, log, user=user) as process:
            wait_until(server.answers, "PostgreSQL", process, log)
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)
