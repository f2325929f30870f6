"""Starts the fork server of `tests.chaos.forked_programs`.

A process that makes documents for a forked accountant imports the main module, as it does an accountant's, which is as
small as this one."""

from __future__ import annotations

if __name__ == "__main__":
    from tests.chaos.forked_programs import run

    run()
