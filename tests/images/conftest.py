"""Builds the images and runs them as a container runtime would: as their user, on a read-only root.

Mount namespaces and chroot stand in for a container engine. That needs root and Debian's buildah; without them the
tests are skipped with one line, and in CI they fail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ("agent", "accountant", "fairshare")
USER = "65532"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gputally" / "images"
_ENTER = """
set -eu
root=$1; data=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777,size=256m tmpfs "$root/tmp"
mount --bind "$data" "$root/mnt"
exec chroot --userspec=65532:65532 --groups=65532 "$root" setpriv --no-new-privs env -i "$@"
"""


@dataclass(frozen=True)
class Image:
    """A built image: its mounted root file system and its configuration."""

    name: str
    root: Path
    config: dict[str, Any]

    def command(self, *words: object, data: Path) -> list[str]:
        """Return the command line of a container runtime: the entry point with these arguments. data: mounted writable
        at /mnt."""
        return self.inside(*self.config["Entrypoint"], *words, data=data)

    def inside(self, *words: object, data: Path) -> list[str]:
        """Run a command in the image with the image's environment only."""
        enter = ["unshare", "--mount", "sh", "-c", _ENTER, "enter", str(self.root), str(data)]
        return [*enter, *self.config["Env"], "TMPDIR=/tmp", *map(str, words)]

    def run(self, *words: object, data: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words, data=data), capture_output=True, text=True, check=False, timeout=120)


def _without(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def built() -> Iterator[dict[str, Image]]:
    """Build the three images if anything changed, and keep them mounted until the tests end."""
    if os.getuid() != 0:
        _without("images are built and run as root: run `make test-real` as root")
    for tool in ("buildah", "debootstrap", "unshare"):
        if shutil.which(tool) is None:
            _without(f"{tool} is missing: `make test-real` installs it")
    environment = {**os.environ, "VENV": os.environ.get("VENV", str(ROOT / ".venv"))}
    script = ["sh", str(ROOT / "scripts" / "images.sh")]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=environment, timeout=1_500)
    assert done.returncode == 0, done.stderr[-4000:]
    references = dict(line.split() for line in done.stdout.splitlines())
    assert tuple(references) == IMAGES
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(_mounted(name, reference)) for name, reference in references.items()}


@contextlib.contextmanager
def _mounted(name: str, reference: str) -> Iterator[Image]:
    container = _buildah("from", "--pull-never", reference)
    try:
        root = Path(_buildah("mount", container))
        config = json.loads(_buildah("inspect", "--type", "image", reference))["OCIv1"]["config"]
        yield Image(name, root, config)
    finally:
        _buildah("umount", container)
        _buildah("rm", container)


def _buildah(*words: str) -> str:
    driver = (CACHE / "driver").read_text("utf-8").strip()
    store: Sequence[str] = ("--root", str(CACHE / f"store-{driver}"), "--runroot", "/run/gputally-images")
    command = ["buildah", *store, "--storage-driver", driver, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest, built: dict[str, Image]) -> Image:
    return built[request.param]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder that belongs to the images' user, as a volume does."""
    folder = tmp_path / "data"
    folder.mkdir()
    os.chown(folder, int(USER), int(USER))
    for parent in folder.parents:
        if parent == Path("/"):
            break
        with contextlib.suppress(PermissionError):
            parent.chmod(parent.stat().st_mode | 0o055)
    return folder
