"""An S3 server on the loopback over a folder: the Versity gateway, built by scripts/object-store.sh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from tests.real.programs import built, free_ports, running, wait_ready


@dataclass(frozen=True)
class ObjectStore:
    """folder: contains a folder for each bucket, whose files are its objects."""

    url: str
    folder: Path
    access_key: str = "tests"
    secret_key: str = "secret-of-the-tests"
    region: str = "us-east-1"

    def bucket(self, name: str) -> str:
        """Create an empty bucket and return its address."""
        (self.folder / name).mkdir()
        return f"s3://{name}"

    def behind(self, url: str) -> ObjectStore:
        """Return the same store at another address, such as a proxy's."""
        return replace(self, url=url)

    def write_secrets(self, path: Path) -> Path:
        """Write the properties to a file that a setting can name."""
        path.write_text(yaml.safe_dump(self.iceberg))
        return path

    @property
    def iceberg(self) -> dict[str, str]:
        """Return the properties for PyIceberg and for Iceberg's S3FileIO in Spark."""
        return {
            "s3.endpoint": self.url,
            "s3.access-key-id": self.access_key,
            "s3.secret-access-key": self.secret_key,
            "s3.region": self.region,
            "client.region": self.region,
            "s3.path-style-access": "true",
        }


@contextlib.contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """Run a server until the block ends."""
    objects = folder / "objects"
    objects.mkdir()
    (port,) = free_ports(1)
    store = ObjectStore(f"http://127.0.0.1:{port}", objects)
    command = [
        str(built("object-store.sh") / "versitygw"), "--port", f"127.0.0.1:{port}", "--access", store.access_key,
        "--secret", store.secret_key, "--region", store.region, "--health", "/health", "posix",
        "--sidecar", str(_made(folder / "metadata")), str(objects),
    ]  # fmt: skip
    log = folder / "versitygw.log"
    with running(command, log) as process:
        wait_ready(f"{store.url}/health", process, log)
        yield store


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
