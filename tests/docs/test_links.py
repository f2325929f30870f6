"""Links and pictures have a target, and no text names the machine on which it was written."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from gputally.server.menu import ENTRIES
from scripts.reference_pages import published
from tests.module_names import name_exists

SEAMS = (
    "agent.gpu_readers",
    "agent.holders",
    "accountant.channels",
    "accountant.exports",
    "accountant.histories",
    "accountant.lake.engines",
    "fairshare.schedulers",
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MODULE = re.compile(r"`((?:agent|accountant|fairshare|gputally|dashboards)(?:\.\w+)+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the fragments that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_somewhere(root: Path, pages: dict[Path, str]) -> None:
    broken = []
    for page, text in pages.items():
        for target in LINK.findall(FENCE.sub("", text)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, fragment = target.partition("#")
            destination = (page.parent / path).resolve() if path else page
            if not destination.exists() or (fragment and fragment not in anchors(destination.read_text("utf-8"))):
                broken.append(f"{page.relative_to(root)}: {target}")
    assert broken == []


def test_every_entry_of_the_menu_has_a_section_of_the_documentation(root: Path) -> None:
    for entry in ENTRIES:
        page, _, section = entry.docs.partition("#")
        assert not section or section in anchors((root / "docs" / f"{page}.md").read_text("utf-8")), entry


def test_every_picture_is_shown_somewhere_and_says_what_it_shows(root: Path, pages: dict[Path, str]) -> None:
    shown = {(page.parent / target).resolve() for page, text in pages.items() for target in LINK.findall(text)}
    kept = {path for path in (root / "docs" / "img").iterdir() if path.suffix in (".png", ".svg")}
    assert kept - shown == set()


def test_the_index_names_every_page(root: Path, pages: dict[Path, str]) -> None:
    index = root / "docs" / "README.md"
    named = {(index.parent / target).resolve() for target in LINK.findall(pages[index])}
    assert {page for page in (root / "docs").glob("*.md") if page != index} - named == set()


def test_every_metric_that_a_page_names_exists(root: Path, pages: dict[Path, str]) -> None:
    known = {name.removesuffix(suffix) for name in published() for suffix in ("", "_bucket")}
    wrong = [
        f"{page.relative_to(root)}: {name}"
        for page, text in pages.items()
        for name in re.findall(r"(?<![\w:./-])gputally_[a-z0-9_]+[a-z0-9](?![\w*…]|\.\w)", text)
        if name not in known
    ]
    assert wrong == []


def test_every_module_that_a_decision_names_is_there(root: Path, pages: dict[Path, str]) -> None:
    decisions = {page: text for page, text in pages.items() if page.parent.name == "adr"}
    gone = [
        f"{page.relative_to(root)}: {name}"
        for page, text in decisions.items()
        for name in MODULE.findall(text)
        if not name_exists(root, name) and not of_a_deleted_plugin(root, name)
    ]
    assert gone == []


def of_a_deleted_plugin(root: Path, name: str) -> bool:
    """Return whether the name is one below the package of a seam, where nothing of this name is."""
    seam = next((one for one in SEAMS if name.startswith(f"{one}.")), None)
    own = root.joinpath(*name.split(".")[: seam.count(".") + 2]) if seam is not None else root
    return not own.exists() and not own.with_suffix(".py").exists()


def test_every_decision_has_the_usual_sections(pages: dict[Path, str]) -> None:
    sections = ["## Context", "## Decision", "## Consequences", "## Alternatives"]
    decisions = {page: text for page, text in pages.items() if re.match(r"\d{4}-", page.name)}
    assert decisions
    for page, text in decisions.items():
        assert re.search(r"^Status: (accepted|superseded)", text, re.MULTILINE), page
        assert re.findall(r"^## .*$", text, re.MULTILINE) == sections, page


def test_every_page_is_reached_from_the_readme(root: Path, pages: dict[Path, str]) -> None:
    reached: set[Path] = set()
    todo = [root / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page not in pages:
            continue
        reached.add(page)
        targets = [t.partition("#")[0] for t in LINK.findall(pages[page]) if not re.match(r"[a-z]+:", t)]
        todo += [(page.parent / target).resolve() for target in targets if target]
    assert {page for page in pages if page.is_relative_to(root / "docs")} - reached == set()


def test_pictures_have_a_text_in_their_place(pages: dict[Path, str]) -> None:
    for page, text in pages.items():
        for alternative in re.findall(r"!\[([^\]]*)\]\(", text):
            assert len(alternative) > 20, page


def test_the_architecture_figure_is_readable_in_the_dark_and_by_machines(root: Path) -> None:
    file = root / "docs" / "img" / "architecture.svg"
    figure = ET.parse(file).getroot()
    names = [child.tag.rsplit("}", 1)[-1] for child in figure]
    assert {"title", "desc", "style"} <= set(names)
    assert "prefers-color-scheme: dark" in file.read_text("utf-8")
    assert not re.search(r"(href|src|url)\s*=?\s*[\"'(]\s*http", file.read_text("utf-8"))


def test_nothing_names_the_machine_it_was_written_on(pages: dict[Path, str]) -> None:
    for page, text in pages.items():
        assert not re.search(r"(?<![\w.])/(work|root|home|Users|tmp)/", text), page


def test_every_fence_is_closed(pages: dict[Path, str]) -> None:
    for page, text in pages.items():
        assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0, page
