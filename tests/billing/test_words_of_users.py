"""No word in a text that a user chose changes an amount: in an invoice's tags and descriptions, and in a price book."""

from __future__ import annotations

import csv
import io
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from accountant.billing.usage_pricing import cost
from accountant.storage.invoice_file import InvoiceItem, read_invoice
from tests.billing.usage_rows import at, held, price_book
from tests.fakes.list_ledger import ListLedger
from tests.hypothesis_examples import examples

SPAN = at("2026-10-01"), at("2026-11-01")
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20) | st.lists(
    st.sampled_from(
        ["|", ",", '"', "\n", "\r\n", "\r", "\\", "'", "Tax", "Spot", "%", "\u2028", "=1+1", "{", "\x1b[2J", "x" * 900]
    ),
    max_size=12,
).map("".join)
FOCUS = {
    "BilledCost": "10.10", "BillingCurrency": "USD", "ChargePeriodStart": "2026-10-02T00:00:00Z",
    "ChargePeriodEnd": "2026-10-02T01:00:00Z", "ChargeCategory": "Usage", "PricingCategory": "Standard",
    "RegionId": "eu-1", "SkuId": "s1", "SkuPriceDetails": '{"InstanceType":"p5.48xlarge"}',
}  # fmt: skip
CUR = {
    "lineItem/UnblendedCost": "10.10", "lineItem/CurrencyCode": "USD",
    "lineItem/UsageStartDate": "2026-10-02T00:00:00Z", "lineItem/UsageType": "EU-BoxUsage:p5.48xlarge",
    "lineItem/LineItemType": "Usage", "product/instanceType": "p5.48xlarge", "product/region": "eu-1",
    "pricing/term": "OnDemand",
}  # fmt: skip
OF_USERS = {
    "focus": (FOCUS, ("ChargeDescription", "ResourceName", "Tags", "SubAccountName", "x_BilledCost")),
    "cur": (CUR, ("lineItem/LineItemDescription", "resourceTags/user:Name", "costCategory/Team", "identity/X")),
}


@pytest.mark.parametrize("kind", OF_USERS)
@settings(max_examples=examples(20, 200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, min_size=10, max_size=10))
@example(words=['a"b'] * 10)
@example(words=["#1"] * 10)
@example(words=["10.10,USD\n99,USD"] * 10)
def test_an_invoice_with_any_description_and_tags_has_the_same_amounts(tmp_path: Path, kind: str, words: list[str]):
    charge, own = OF_USERS[kind]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    # The columns of users before, between and behind those that count.
    names = [*own[:2], *charge, *own[2:]]
    writer.writerow(names)
    for start in (0, 5):
        chosen = dict(zip(own, words[start:], strict=False))
        writer.writerow([{**charge, **chosen}[name] for name in names])
    file = tmp_path / f"{kind}.csv"
    file.write_text(text.getvalue(), "utf-8", newline="")
    assert read_invoice(file, *SPAN) == [InvoiceItem("p5.48xlarge", "eu-1", "on-demand", "USD", Decimal("20.20"))]


def test_a_charge_whose_description_begins_with_a_number_sign_is_no_comment(tmp_path: Path):
    """Unquoted, in the first column, as a provider writes it."""
    names = ",".join(["ChargeDescription", *(name for name in FOCUS if name != "SkuPriceDetails")])
    charges = [",".join([text, *(FOCUS[name] for name in names.split(",")[1:])]) for text in ("a", "#team-7", "b")]
    (tmp_path / "focus.csv").write_text("\n".join([names, *charges]) + "\n")
    assert [one.amount for one in read_invoice(tmp_path / "focus.csv", *SPAN)] == [Decimal("30.30")]


@pytest.mark.parametrize("details", ["{", "Instance: p5", '{"InstanceType": 7', ""])
def test_one_line_with_details_that_are_no_json_does_not_spoil_the_others(tmp_path: Path, details: str):
    text = io.StringIO()
    writer = csv.DictWriter(text, FOCUS, lineterminator="\n")
    writer.writeheader()
    writer.writerows([FOCUS, {**FOCUS, "SkuPriceDetails": details}])
    (tmp_path / "focus.csv").write_text(text.getvalue())
    amounts = {one.instance: one.amount for one in read_invoice(tmp_path / "focus.csv", *SPAN)}
    assert amounts == {"p5.48xlarge": Decimal("10.10"), "s1": Decimal("10.10")}


@settings(max_examples=examples(20, 200))
@given(WORDS.filter(str.strip), WORDS)
def test_the_texts_of_a_price_book_change_no_price(source: str, team: str):
    """Its sources, and the names of the teams whose time it prices."""
    row = "id: h100, model: H100, price: '6.88', valid_from: 2026-01-01"
    book = price_book(row)
    renamed = book.model_copy(
        update={"rows": tuple(one.model_copy(update={"source": source[:1000]}) for one in book.rows)}
    )
    rows = [held("2026-10-01", "2026-11-01", 2, team=team or "t")]
    costs = {cost(ListLedger(rows), each, *SPAN, by=("team",)).total for each in (book, renamed)}
    assert costs == {Decimal("6.88") * 2 * 744}
