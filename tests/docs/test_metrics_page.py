"""The page of metrics is what the code says, and no metric breaks the rules of naming."""

import re

from scripts.reference_pages import METRICS_PAGE, MODULES, agent_families, families_in, metrics_page

NOT_BASE = "ms|us|mib|mw|mj|percent|mhz|hours|minutes|days|microseconds|milliseconds"


def test_the_page_is_fresh() -> None:
    assert METRICS_PAGE.read_text(encoding="utf-8") == metrics_page(), "write it anew: make reference"


def test_every_metric_has_our_prefix_a_meaning_and_a_unit() -> None:
    programs = [
        list(agent_families()),
        *([f for module in modules for f in families_in(module)] for modules in MODULES.values()),
    ]
    for program in programs:
        assert len({family.name for family in program}) == len(program)
    families = [family for program in programs for family in program]
    assert len(families) > 50
    for family in families:
        # One name that others agreed on, opt-in.
        assert family.name == "training_job_cost_usd" or re.fullmatch(r"gputally_[a-z0-9_]+", family.name)
        assert len(family.text) > 10
        assert not re.search(rf"_({NOT_BASE})(_|$)", family.name), family.name
        assert "pod_uid" not in family.labels
        assert not {"job", "instance"} & set(family.labels), "Prometheus gives these labels to what it scrapes"
