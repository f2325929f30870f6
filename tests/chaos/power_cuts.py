"""Simulates a power cut: what was synced remains, and of later writes any blocks may remain."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("power_cut.c")
BLOCK = 4096


@dataclass(frozen=True)
class PowerCuts:
    """The simulated disk is `places`, folders within `folder`. `power_cut.c` copies what is synced to `shadow`, by
    inode."""

    folder: Path
    places: tuple[str, ...]
    shadow: Path
    library: Path

    @classmethod
    def of(cls, folder: Path, places: tuple[str, ...], aside: Path) -> PowerCuts:
        """Compile the library. Raises CalledProcessError with the compiler's output."""
        library, shadow = aside / "power_cut.so", aside / "shadow"
        shadow.mkdir()
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
        return cls(folder, places, shadow, library)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of a program whose syncs are recorded."""
        return {
            "LD_PRELOAD": str(self.library),
            "POWER_CUT_FOLDER": str(self.folder),
            "POWER_CUT_SHADOW": str(self.shadow),
        }

    def cut(self, chance: random.Random) -> int:
        """Replace each file by what a power cut might leave of it, and return how many files lost data."""
        lost = 0
        kept: dict[str, bytes] = {}
        for path in sorted(path for place in self.places for path in (self.folder / place).rglob("*")):
            if not path.is_file():
                continue
            shadow = self.shadow / str(path.stat().st_ino)
            written = path.read_bytes()
            left = torn(shadow.read_bytes() if shadow.exists() else b"", written, chance)
            if left != written:
                path.write_bytes(left)
                lost += 1
            kept[shadow.name] = left
        for stale in self.shadow.iterdir():
            stale.unlink()
        for name, content in kept.items():
            (self.shadow / name).write_bytes(content)
        return lost


def torn(synced: bytes, written: bytes, chance: random.Random, block_bytes: int = BLOCK) -> bytes:
    """Return `synced` with some of the blocks that `written` changed, and with a length between the two."""
    if synced == written:
        return written
    share = chance.choice((0.0, 0.5, 0.5, 0.9))
    shorter, longer = sorted((len(synced), len(written)))
    length = chance.choice((len(synced), chance.randint(shorter, longer)))
    found = bytearray()
    for start in range(0, length, block_bytes):
        newer = chance.random() < share
        block = (written if newer else synced)[start : min(start + block_bytes, length)]
        found += block.ljust(min(block_bytes, length - start), b"\0")
    return bytes(found)
