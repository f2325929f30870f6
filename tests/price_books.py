"""Price books as the files that operators write."""

from __future__ import annotations


def price_book_text(*, currency: str = "EUR", source: str = "contract", **prices: object) -> str:
    """A book with the price of a GPU-hour of each model (`H100="2.40"`) from 2026 on. The id of a row is the model's
    name in small letters."""
    rows = "".join(
        f"  - {{id: {model.lower()}, model: {model}, price: {price}, per: gpu-hour, valid_from: 2026-01-01,"
        f" source: {source}, as_of: 2026-01-01, basis: gpu-only}}\n"
        for model, price in prices.items()
    )
    return f"schema: 1\ncurrency: {currency}\nrows:\n{rows}"
