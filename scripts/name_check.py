"""Checks that no module, class or function has a meaningless name, and that texts name the program or person that acts.

`python -m scripts.name_check` prints each place with such a name or word and ends with status 1 if there is one.
CONTRIBUTING.md says how to choose a name."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("agent", "accountant", "fairshare", "gputally", "dashboards", "scripts", "tests")
REFUSED = frozenset(
    [
        "adopting",
        "answers",
        "apart",
        "asked",
        "asking",
        "barred",
        "billed",
        "carriers",
        "carrying",
        "carving",
        "cells",
        "changes",
        "court",
        "crew",
        "dated",
        "demands",
        "doors",
        "entries",
        "epochs",
        "explained",
        "explaining",
        "few",
        "freezing",
        "governing",
        "grains",
        "held",
        "invoices",
        "joblines",
        "house",
        "keeping",
        "kept",
        "knocked",
        "ladder",
        "layers",
        "lenses",
        "letters",
        "live",
        "looking",
        "making",
        "marks",
        "meanwhile",
        "measured",
        "memory",
        "muster",
        "occasions",
        "office",
        "opening",
        "orders",
        "placing",
        "playing",
        "plot",
        "portions",
        "preempter",
        "preempting",
        "prepared",
        "progress",
        "pulses",
        "recalled",
        "reported",
        "resuming",
        "rulings",
        "running",
        "settling",
        "sheets",
        "siblings",
        "soon",
        "sparing",
        "still_cut",
        "stopped",
        "stranded",
        "telling",
        "terms",
        "told",
        "torn",
        "unfolded",
        "unheard",
        "view",
        "warming",
        "watched",
        "waysin",
        "whose",
        "wholefile",
    ]
)
"""Words that a module's path may not contain: participles without an object, metaphors, and everyday words that mean
something else to an engineer."""


PRODUCTION = ("agent", "accountant", "fairshare", "gputally", "dashboards")
REFUSED_DEFINITIONS = frozenset(
    [
        "above", "again", "ahead", "anew", "apart", "aparts", "asked", "asker", "asking", "atpresent", "because",
        "beside", "carrier", "coming", "court", "crew", "decided", "doors", "everybody", "few", "given", "gone", "got",
        "grains", "held", "house", "kept", "knock", "knocked", "large", "lent", "letter", "made", "makeshift", "marks",
        "meant", "moment", "momentary", "muster", "nobody", "nobodycomesin", "noted",
        "occasion", "office", "old", "opening",
        "paced", "people", "placed", "player", "plot", "premises", "prepared", "pulses", "recalled", "ripe", "room",
        "said", "scene", "seal", "sibling", "still_cut", "sighted", "situation", "soon", "spared", "steering",
        "stocktaking", "stray", "stretch", "strip", "stuck", "taken", "taking", "tally", "telling", "told",
        "unheard", "unsettled", "unsure", "vetting", "visit", "waited", "waysin", "whose", "wish", "zoned",
    ]
)  # fmt: skip
"""Names that a class or function of a module may not have, in lower case and without leading underscores."""


TEXTS = (*PRODUCTION, "scripts", "helm", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", "SUPPORT.md")
SUFFIXES = frozenset([".py", ".sql", ".html", ".md", ".yaml", ".tpl", ".txt", ".ipynb", ".json"])
VAGUE = re.compile(
    r"\b(?:whoever|whomever|nobody|somebody|everybody|anybody"  # name the program, client, team or workload that acts
    r"|anew|(?:is|are) none of ours|stands (?:here|there) twice|cannot be told\b(?! apart)|what stands (?:here|there)"
    r"|of the question|as (?:it|they) stands?)\b"
    r'|"""(?:Whom|Whose|Whatever)\b',
    re.IGNORECASE,
)
"""Words for actors without a name, and phrases that readers have to read twice."""


def vague(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, words) of each match of `VAGUE`."""
    for number, line in enumerate(text.splitlines(), 1):
        for word in VAGUE.findall(line):
            yield number, word


def texts(root: Path) -> Iterator[Path]:
    """Yield the paths, relative to `root`, of all files whose text people read. This module is left out, because it
    contains the refused words."""
    for place in TEXTS:
        top = root / place
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in SUFFIXES and path != Path(__file__):
                yield path.relative_to(root)


def riddles(source: str) -> list[str]:
    """Return the names of a module's classes and functions that are in `REFUSED_DEFINITIONS`."""
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in ast.parse(source).body if isinstance(node, definitions)]
    return [name for name in names if name.lstrip("_").lower() in REFUSED_DEFINITIONS]


def refused(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that have a part in `REFUSED`, apart from a leading `test_`."""
    return [
        path
        for path in paths
        if REFUSED.intersection(part.removeprefix("test_") for part in path.with_suffix("").parts)
    ]


def modules(root: Path) -> list[Path]:
    """Return the paths of all modules below `FOLDERS`, relative to `root` and sorted."""
    return sorted(path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def main() -> int:
    found = refused(modules(ROOT))
    for path in found:
        print(f"{path}: name the module by a noun of the field (CONTRIBUTING.md, The rules)")
    named = [
        (path, name)
        for path in modules(ROOT)
        if path.parts[0] in PRODUCTION
        for name in riddles((ROOT / path).read_text(encoding="utf-8"))
    ]
    for path, name in named:
        print(f"{path}: {name}: choose a word of the field (CONTRIBUTING.md, The rules)")
    worded = [(path, *each) for path in texts(ROOT) for each in vague((ROOT / path).read_text(encoding="utf-8"))]
    for path, line, word in worded:
        print(f"{path}:{line}: {word}: use plain words, and name who or what acts (CONTRIBUTING.md, The rules)")
    return 1 if found or named or worded else 0


if __name__ == "__main__":
    sys.exit(main())
