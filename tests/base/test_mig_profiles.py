"""The table of MIG: names of profiles in every spelling, and the slices of GPUs by any name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputally.base.mig_profiles import compute_slices, instances_of, mig_sizes, parse_mig_profile
from gputally.kubernetes.mig_parts import NO_NODES
from gputally.kubernetes.objects import gpus


@pytest.mark.parametrize(
    ("name", "parts", "resource"),
    [
        ("1g.10gb", (1, 1, 10, ""), "1g.10gb"),
        ("1c.3g.40gb+me", (3, 1, 40, "me"), "1c.3g.40gb.me"),
        ("1g.24gb-me", (1, 1, 24, "me"), "1g.24gb.me"),
        ("1g.24gb+me.all", (1, 1, 24, "me.all"), "1g.24gb.me.all"),
        ("2g.48gb+gfx", (2, 2, 48, "gfx"), "2g.48gb.gfx"),
        ("1g_24gb_me_all", (1, 1, 24, "me.all"), "1g.24gb.me.all"),
    ],
)
def test_names_of_profiles(name, parts, resource):
    mig = parse_mig_profile(name)
    assert (mig.gpu_instance, mig.compute_instance, mig.memory_gb, mig.suffix) == parts
    assert mig.resource == resource


@pytest.mark.parametrize("name", ["", "half", "0g.10gb", "1g.10", "1g.10gb+", "10g.10gb", "1g.10gb\n"])
def test_what_is_no_profile(name):
    assert parse_mig_profile(name) is None


@pytest.mark.parametrize(
    ("product", "slices"),
    [
        ("NVIDIA A100-SXM4-80GB", 7),
        ("NVIDIA-A30-MIG-1g.6gb", 4),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 4),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition", 4),
        ("nvidia rtx pro 5000 blackwell", 2),
        ("NVIDIA RTX PRO 4500 Blackwell", 2),
        ("NVIDIA RTX 6000 Ada Generation", 7),
        ("", 7),
    ],
)
def test_slices_of_gpus(product, slices):
    assert compute_slices(product) == slices


def test_the_slices_of_a_gpu_without_a_name_are_those_of_its_profile():
    assert [compute_slices(profile=name) for name in ("1g.6gb", "1g.24gb+gfx", "1g.32gb", "3g.40gb")] == [4, 4, 7, 7]
    assert compute_slices("NVIDIA H100 NVL", "1g.24gb") == 7
    for resources in ({"nvidia.com/mig-1g.24gb": "4"}, {"nvidia.com/mig-2g.48gb.gfx": "2"}):
        assert gpus(resources, NO_NODES.anywhere) == 1


@given(st.text(max_size=30), st.sampled_from(["1g.24gb", "4g.96gb", "7g.80gb", "3g.20gb"]))
def test_no_instance_is_larger_than_its_gpu(product, profile):
    assert parse_mig_profile(profile).gpu_instance <= compute_slices(product, profile)


def test_instances_of_a_gpu_smallest_first():
    names = {product: [size.name for size in mig_sizes(product, gb)] for product, gb in (
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None), ("NVIDIA RTX PRO 5000 Blackwell", 48),
        ("NVIDIA H200", None), ("NVIDIA H100 NVL", None), ("NVIDIA L4", 24),
    )}  # fmt: skip
    assert names == {
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": ["1g.24gb", "2g.48gb"],
        "NVIDIA RTX PRO 5000 Blackwell": ["1g.24gb"],
        "NVIDIA H200": ["1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb"],
        "NVIDIA H100 NVL": ["1g", "1g", "2g", "3g", "4g"],
        "NVIDIA L4": [],
    }


@pytest.mark.parametrize(
    ("product", "profile", "count"),
    [
        ("NVIDIA-A100-SXM4-80GB", "1g.10gb", 7),
        ("NVIDIA-A100-SXM4-80GB", "1g.20gb", 4),
        ("NVIDIA-A100-SXM4-80GB", "3g.40gb", 2),
        ("NVIDIA-H100-NVL", "1g.24gb", 4),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "1g.24gb", 4),
        ("NVIDIA-RTX-PRO-5000-Blackwell", "1g.24gb", 2),
        ("NVIDIA-A30", "1g.6gb+me", 4),
        ("NVIDIA-H100-80GB-HBM3", "7g.80gb", 1),
        ("anything", "", 1),
    ],
)
def test_as_many_instances_of_one_profile_as_slices_and_memory_allow(product, profile, count):
    assert instances_of(product, profile) == count
