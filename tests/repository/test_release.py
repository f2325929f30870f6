"""The parts of a release agree, and its workflows run only pinned actions and tools."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import release
from scripts.release import Refused

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
CHANGELOG = """# Changelog

## [0.2.0] - 2027-01-31

### Added

- Two.

## [0.1.0] - 2026-12-01

- One.
"""


def test_the_notes_of_a_version_are_its_section() -> None:
    assert release.notes(CHANGELOG, "0.2.0") == "### Added\n\n- Two.\n"
    assert release.notes(CHANGELOG, "0.1.0") == "- One.\n"
    for absent in ("0.3.0", "0.1"):
        with pytest.raises(Refused, match=re.escape(f"the section `## [{absent}]` is missing")):
            release.notes(CHANGELOG, absent)


def test_package_chart_and_lock_file_have_one_version() -> None:
    here = release.agreed(None)
    locked = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
    assert [package["version"] for package in locked if package["name"] == "gputally"] == [here]


def test_a_tag_of_another_version_is_refused() -> None:
    with pytest.raises(Refused, match=r"the tag is v9\.9\.9, but the version in pyproject\.toml is"):
        release.agreed("v9.9.9")


def test_a_step_that_is_not_there_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as wrong:
        release.main(["--without", "imgaes"])
    assert wrong.value.code == 2
    assert "there is no step imgaes; the steps are notes, package" in capsys.readouterr().err


def _jobs() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text("utf-8"))["jobs"].items():
            found.append((f"{path.name}: {name}", job))
    return found


def test_every_action_is_pinned_by_its_commit() -> None:
    used = [step["uses"] for _, job in _jobs() for step in job.get("steps", ()) if "uses" in step]
    assert len(used) > 10
    assert [action for action in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action)] == []


def test_jobs_have_an_end_and_no_rights_that_they_do_not_name() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text("utf-8"))["permissions"] == {"contents": "read"}, path.name
    for name, job in _jobs():
        assert "uses" in job or job["timeout-minutes"] <= 90, name
        assert not {"actions", "secrets", "administration"} & job.get("permissions", {}).keys(), name


def test_only_what_publishes_may_write() -> None:
    writing = {
        name: {right for right, how in job.get("permissions", {}).items() if how == "write"} for name, job in _jobs()
    }
    assert {name: rights for name, rights in writing.items() if rights} == {
        "release.yaml: pypi": {"id-token"},
        "release.yaml: images": {"packages", "id-token"},
        "release.yaml: chart": {"packages", "id-token"},
        "release.yaml: notes": {"contents"},
    }
