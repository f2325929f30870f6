"""Stores files in a folder, or under a prefix of an object store (`s3://`, `gs://`, `abfs://`).

A file written with `create` appears completely or not at all and is never overwritten. In an object store, two writers
at the same moment are not detected. The files written with `create` are manifests. A writer creates the manifest after
the data files that belong to it, so a data file without a manifest was left behind by an interrupted writer. DuckDB
reads the store's files by the name that `url` returns."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.fs as arrow_files

from accountant.core.errors import LedgerUnavailable
from accountant.core.settings import ObjectStorage, secret_properties
from gputally.base import atomic_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PROTOCOL: Final = "archive"
"""URL scheme by which DuckDB knows files of an object store."""
_CHUNK: Final = 2**20


class FileStore:
    """Reads and writes files in a folder or under a prefix. Names are relative to it, with slashes. Every method raises
    LedgerUnavailable, with the place and the reason, if the store cannot be reached.

    address: the address in the settings.
    files: a file system whose root is `address`.
    staging: a local folder for files before their upload.
    folder: the store's folder if it is local, otherwise None."""

    def __init__(self, address: str, files: arrow_files.FileSystem, staging: Path, folder: Path | None = None) -> None:
        self.address = address
        self.folder = folder
        self._files = files
        self._staging = staging

    def __str__(self) -> str:
        return self.address

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders in a folder, sorted; empty if the folder does not exist."""
        with self._reachable():
            found = self._files.get_file_info(arrow_files.FileSelector(folder, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def exists(self, name: str) -> bool:
        with self._reachable():
            return bool(self._files.get_file_info(name).type == arrow_files.FileType.File)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file in chunks."""
        with self._reachable(), self._files.open_input_stream(name, compression=None) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def read(self, name: str) -> bytes:
        return b"".join(self.chunks(name))

    def sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        for chunk in self.chunks(name):
            digest.update(chunk)
        return digest.hexdigest()

    def get(self, name: str, to: Path) -> str:
        """Copy a file to a new local one, and return its SHA-256."""
        digest = hashlib.sha256()
        with self._reachable():
            to.parent.mkdir(parents=True, exist_ok=True)
            with to.open("xb") as file:
                for chunk in self.chunks(name):
                    digest.update(chunk)
                    file.write(chunk)
        return digest.hexdigest()

    def url(self, name: str) -> str:
        """Return the name by which DuckDB opens a file."""
        return f"{PROTOCOL}://{name}" if self.folder is None else str(self.folder / name)

    def engine_files(self) -> AbstractFileSystem | None:
        """Return the file system through which DuckDB opens a `url`; None if DuckDB opens the files itself, which it
        does in a folder."""
        return None if self.folder is not None else _engine_files(self._files)

    def create(self, name: str, content: bytes) -> None:
        """Write a small file, completely or not at all. Raises LedgerUnavailable if the file exists. In an object
        store, two writers at the same moment are not detected, so a lease must prevent them."""
        if self.exists(name):
            raise LedgerUnavailable(
                f"{self.address}/{name}: the file exists already and is not overwritten: give every accountant a "
                "folder or prefix of its own"
            )
        with self._reachable():
            if self.folder is not None:
                place = self.folder / name
                fresh = place.with_name(f".{place.name}.part")
                place.parent.mkdir(parents=True, exist_ok=True)
                fresh.unlink(missing_ok=True)
                try:
                    fresh.write_bytes(content)
                    atomic_file.sync(fresh)
                    os.link(fresh, place)  # unlike rename, link fails if the file was created meanwhile
                finally:
                    fresh.unlink(missing_ok=True)
                atomic_file.sync(place.parent)
            else:
                self._write(name, (content,))

    @contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        """Create an empty local folder, from which files are then moved into the store with `put`, and remove it after
        the block."""
        with self._reachable():
            fresh = (self.folder or self._staging) / f".{name}"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        try:
            yield fresh
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def put(self, source: Path, name: str) -> None:
        """Move a local file durably into the store, replacing a file of that name."""
        with self._reachable():
            if self.folder is not None:
                place = self.folder / name
                atomic_file.sync(source)
                place.parent.mkdir(exist_ok=True)
                source.replace(place)
                atomic_file.sync(place.parent)
                atomic_file.sync(self.folder)
                return
            with source.open("rb") as file:
                self._write(name, iter(lambda: file.read(_CHUNK), b""))
            if self.sha256(name) != sha256(source):
                raise LedgerUnavailable(
                    f"{self.address}/{name}: the stored file differs from the uploaded one: upload it again"
                )
            source.unlink()

    def delete(self, name: str) -> None:
        """Remove a file. It is no error if the file does not exist."""
        with self._reachable():
            if self._files.get_file_info(name).type != arrow_files.FileType.NotFound:
                self._files.delete_file(name)

    def _write(self, name: str, chunks: Any) -> None:
        with self._files.open_output_stream(name, compression=None) as file:
            for chunk in chunks:
                file.write(chunk)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
            raise _unusable(self.address, reason) from error


def _unusable(address: str, reason: str) -> LedgerUnavailable:
    return LedgerUnavailable(
        f"{address}: the store cannot be read or written: {reason}: check the address, the access rights and the free "
        "space"
    )


def in_folder(folder: Path) -> FileStore:
    """Return the store in a local folder, which need not exist yet."""
    place = folder.absolute()
    files = arrow_files.SubTreeFileSystem(str(place), arrow_files.LocalFileSystem())
    return FileStore(str(folder), files, place, place)


def open_store(address: str, storage: ObjectStorage, staging: Path) -> FileStore:
    """Return the store at an address (`accountant.core.settings.StoreAddress`), with the access settings of object
    storage. Raises LedgerUnavailable if the settings do not lead to a store."""
    if "://" not in address:
        return in_folder(Path(address))
    # Imported only here: it takes a third of a second and 40 MiB.
    from pyiceberg.io.pyarrow import PyArrowFileIO

    try:
        io = PyArrowFileIO({**storage.properties, **secret_properties(storage.secrets)})
        scheme, host, root = io.parse_location(address.rstrip("/"), io.properties)
        files = io.fs_by_scheme(scheme, host)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unusable(address, str(error).partition("\n")[0]) from error
    return FileStore(address.rstrip("/"), arrow_files.SubTreeFileSystem(root, files), staging)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a local file in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _engine_files(files: arrow_files.FileSystem) -> AbstractFileSystem:
    from fsspec.implementations.arrow import ArrowFSWrapper

    class EngineFiles(ArrowFSWrapper):  # type: ignore[misc]
        """Opens the store's files by their URLs."""

        cachable = False  # otherwise fsspec would reuse the instance for another store
        protocol = PROTOCOL

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path.removeprefix(f"{PROTOCOL}://")

    return EngineFiles(files)
