"""Every unmarked command of the pages runs, in order, and prints what its page shows.

`GPUTALLY_UPDATE=1` puts what is printed now into the pages, where they show it without an ellipsis. Read the
difference."""

from __future__ import annotations

import os

import pytest

from gputally.base.yaml_file import FileFault
from tests.docs import kinds
from tests.docs.fences import Fence
from tests.docs.following import PAGES, follow, with_commands
from tests.docs.shell import Shell


@pytest.mark.parametrize("page", with_commands(None))
def test_the_commands_of_the_page_run(page: str, shell: Shell) -> None:
    otherwise = follow(page, [None], shell)
    assert otherwise == [], "\n\n".join(otherwise)


@pytest.mark.parametrize(
    "fence", [pytest.param(f, id=f.where) for blocks in PAGES.values() for f in blocks if f.language == "yaml"]
)
def test_the_yaml_of_the_pages_is_taken(fence: Fence) -> None:
    try:
        kinds.check(fence.words[0], fence.text, fence.where)
    except FileFault as fault:
        pytest.fail(os.linesep.join(fault.faults))
