"""What nodes of Slurm offer is read once, also of a long text."""

from __future__ import annotations

from accountant.histories.slurm.job_records import offers


def test_what_a_node_offers_is_read_once() -> None:
    assert offers("n1|" + "(" * 250_000)[0] == {}
    assert offers("n1|gpu:a100:8(S:0-1),gpu:h100:2(S:1)")[0]["n1"].types == {"a100": 8, "h100": 2}
