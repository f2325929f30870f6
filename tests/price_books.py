"""Price books as operators write them."""

from __future__ import annotations


def price_book_text(*, currency: str = "EUR", source: str = "contract", **prices: object) -> str:
    """Return a book with the price of a GPU-hour of each model (`H100="2.40"`) from 2026 on. A row's id is the model's
    name in lower case."""
    rows = "".join(
        f"  - {{id: {model.lower()}, model: {model}, price: {price}, per: gpu-hour, valid_from: 2026-01-01,"
        f" source: {source}, as_of: 2026-01-01, basis: gpu-only}}\n"
        for model, price in prices.items()
    )
    return f"schema: 1\ncurrency: {currency}\nrows:\n{rows}"
