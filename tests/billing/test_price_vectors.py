"""Published prices: node prices divided, per-model labels, configured prices unchanged, billing weights, quotas."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from accountant.prices.price_book import AWS_WEIGHTS, Instance, ResourceWeights, commitment_use
from accountant.reports.report_breakdowns import share
from gputally.base.money import exact_product

HOUR = 3_600_000_000


def printed(value, text):
    """Whether an exact figure is what the source prints."""
    places = -Decimal(text).as_tuple().exponent
    return round(Fraction(value) * 10**places) == Fraction(text) * 10**places


def test_a_node_price_is_divided_by_ratio(vectors):
    case = vectors["opencost-spec-appendix-a"]
    prices = case["input"]["base_prices"]
    weights = ResourceWeights({name: Fraction(value) for name, value in prices.items()})
    parts = weights.divide(Decimal(case["input"]["node_price_month"]), case["input"]["resources"])
    assert parts == case["expect"]
    assert sum(parts.values()) == case["input"]["node_price_month"]


def test_aws_accelerated_split(vectors):
    case = vectors["aws-split-accelerated-unit-cost"]
    given, expected = case["input"], case["expect"]
    assert given["weights"] == {"gpu": "9", "vcpu": "0.9", "gb": "0.1"}
    weights = ResourceWeights.parse(AWS_WEIGHTS)
    amounts = {"gres/gpu": given["gpus"], "cpu": given["vcpus"], "mem": given["memory_gb"] * 1024}
    parts = weights.divide(Decimal(given["price_per_hour"]), amounts)
    assert sum(parts.values()) == Decimal(expected["sum_back_to_instance_price"])
    assert printed(parts["gres/gpu"] / given["gpus"], expected["gpu_hour_exact"])
    assert printed(parts["cpu"] / given["vcpus"], expected["vcpu_hour_exact"])
    assert printed(parts["mem"] / given["memory_gb"], expected["gb_hour_exact"])
    assert printed(given["price_per_hour"] / weights.units(amounts), expected["unit_cost_exact"])
    # What the source prints for the GB-hour does not follow from its own weights.
    assert not printed(parts["mem"] / given["memory_gb"], expected["gb_hour_printed"])
    row = Instance(name=given["instance"], price="10", gpus=8, vcpus=64, memory_gb=488, weights=AWS_WEIGHTS)
    assert printed(row.unit_price(), expected["gpu_hour_exact"])


def test_aws_cpu_split(vectors):
    case = vectors["aws-split-cpu-unit-cost"]
    given = case["input"]
    weights = ResourceWeights({name: Fraction(value) for name, value in given["weights"].items()})
    amounts = {"vcpu": given["vcpus"], "gb": given["memory_gb"]}
    parts = weights.divide(Decimal(given["price_per_hour"]), amounts)
    assert printed(given["price_per_hour"] / weights.units(amounts), case["expect"]["unit_cost_exact"])
    assert printed(parts["vcpu"] / given["vcpus"], case["expect"]["vcpu_hour_exact"])


def test_prices_by_label(books, vectors):
    """A node costs its own row and its GPUs'; ours prices the GPUs by the very model that the label names."""
    case = vectors["opencost-csv-gpu-price"]
    for node, expected in zip(case["input"], case["expect"], strict=True):
        (model,) = node["gpu_label"].values()
        book = books.price_book(f"id: a, model: {model}, price: '{node['gpu_price']}', valid_from: 2026-01-01")
        price = book.unit_price(model, books.at("2026-10-01")).price
        assert exact_product(price, Decimal(node["gpus"])) + Decimal(str(node["node_base"])) == Decimal(str(expected))


def test_a_configured_price_comes_out_unchanged(books, vectors):
    """The defect upstream: a price per core was taken for that of the node and divided again."""
    case = vectors["opencost-issue-2418-root-cause"]
    for given, expected in zip(case["input"], case["expect"], strict=True):
        configured = str(given["configured"]["gpu"])
        book = books.price_book(f"id: a, model: T4, price: '{configured}', valid_from: 2026-01-01")
        price = book.unit_price("Tesla T4", books.at("2026-10-01")).price
        assert price == Decimal(expected["correct"]["gpu"]) != Decimal(expected["opencost_gives"]["gpu"])
        # Divided as a node's price on purpose, the parts are the configured prices too.
        node = {"cpu": given["node"]["cpu"], "gpu": given["node"]["gpu"], "ram": Fraction(given["node"]["ram_gib"])}
        weights = ResourceWeights({name: Fraction(value) for name, value in given["configured"].items()})
        parts = weights.divide(weights.units(node), node)
        assert {name: str(part / node[name]) for name, part in parts.items()} == expected["correct"]


def test_slurm_billing_weights(vectors):
    case = vectors["slurm-tres-billing"]
    weights = ResourceWeights.parse(case["input"]["weights"])
    job = {"cpu": 1, "mem": case["input"]["job"]["mem_gb"] * 1024, "gres/gpu": 0, "license/lica": 0}
    assert weights.units(job) == case["expect"]["sum_rule"]
    assert max(weights.terms(job).values()) == case["expect"]["max_tres_rule"]
    plain = ResourceWeights.parse("Mem=0.25")
    assert plain.units({"mem": job["mem"]}) == case["expect"]["mem_weight_plain_0_25"]
    assert weights.units({"mem": job["mem"]}) == case["expect"]["mem_weight_0_25G"]


@pytest.mark.parametrize("text", ["", "CPU", "CPU=", "CPU=-1", "CPU=1,CPU=2", "Mem=0.25X", "=1", "CPU=1e3"])
def test_weights_that_are_none(text):
    with pytest.raises(ValueError, match="not a weight"):
        ResourceWeights.parse(text)


def test_service_units(vectors):
    """An H100 node of 8 and a CPU node of 96 cores, by the larger of their two counts."""
    weights = ResourceWeights.parse("CPU=1,GRES/gpu=120")
    jobs = [{"cpu": 96}, {"cpu": 96, "gres/gpu": 8}, {"cpu": 12, "gres/gpu": 1}]
    assert [max(weights.terms(job).values()) for job in jobs] == vectors["ncsa-rails-su"]["expect"]


def test_mig_devices_are_no_gpus(books, vectors):
    """The labels of MIG strategy single count instances; our model name and capacity are the physical GPU's."""
    case = vectors["gfd-mig-single-labels"]
    labels, expected = case["input"]["labels"], case["expect"]
    assert int(labels["nvidia.com/gpu.count"]) == expected["mig_devices"]
    book = books.price_book("id: a, model: A100-40GB, price: 2, valid_from: 2026-01-01")
    price = book.unit_price(labels["nvidia.com/gpu.product"], books.at("2026-10-01")).price
    instances = expected["mig_devices"]
    sevenths = instances * int(labels["nvidia.com/gpu.slices.gi"])
    assert price * sevenths / 7 == 2 * expected["physical_gpus_at_7_per_gpu"]


def test_unused_quota(vectors):
    case = vectors["opencost-quota-overhead"]["input"]
    prices = {"cpu": Decimal(str(case["price"]["cpu"])), "ram": Decimal(str(case["price"]["ram"]))}
    unused = {
        "cpu": case["quota"]["cpu"] - case["used"]["cpu"],
        "ram": case["quota"]["ram_gib"] - case["used"]["ram_gib"],
    }
    found = {name: prices[name] * unused[name] * case["hours"] for name in prices}
    expected = vectors["opencost-quota-overhead"]["expect"]
    assert {name: float(value) for name, value in found.items()} == {"cpu": expected["cpu"], "ram": expected["ram"]}
    assert float(sum(found.values())) == expected["total"]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_commitments(vectors, number):
    case = vectors[f"focus-commitment-usage-{number}"]
    left, found = Decimal(case["input"]["commit_per_hour"]), []
    for usage in map(Decimal, case["input"]["usage_effective"]):
        hour = commitment_use(left, usage)
        found += [("Used", Decimal(0), hour.used), (None, hour.beyond, hour.beyond)]
        left = hour.unused
    found.append(("Unused", Decimal(0), left))
    rows = [
        {
            "status": status,
            "PricingCategory": "Standard" if status is None else "Committed",
            "BilledCost": f"{billed:.2f}",
            "EffectiveCost": f"{effective:.2f}",
            "ConsumedQuantity": None,
            "ResourceId": "<commitment id>",
        }
        for status, billed, effective in found
        if effective
    ]
    assert len(rows) == len(case["expect"])
    for row, expected in zip(rows, case["expect"], strict=True):
        assert {name: row[name] for name in expected} == expected


def test_a_spend_agreement(vectors):
    case = vectors["focus-saas-spend-a1"]
    given, expected = case["input"], case["expect"]
    billed = [given["contracted_unit_price"] * quantity for quantity in given["monthly_quantities"]]
    listed = [given["list_unit_price"] * quantity for quantity in given["monthly_quantities"]]
    assert (billed, listed) == (expected["billed"], expected["list"])
    assert commitment_use(Decimal(given["commit"]), Decimal(sum(billed))).unused == expected["unused_fee"]


def test_shares_of_the_cluster(vectors):
    case = vectors["princeton-sponsor-report"]
    for kind in ("gpu", "cpu"):
        part, whole = case["input"][f"group_{kind}_hours"], case["input"][f"total_{kind}_hours"]
        assert round(share(part, whole) * 100, 1) == case["expect"][f"{kind}_share_pct"]
