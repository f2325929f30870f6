"""Builds reports of months and other spans: their data, tables, charts and page.

`report_builder` reads a statement and what belongs to it. `statement_line_charges` divides its lines into charges that
add up to them, for the formats that list charges. accountant.exports writes the files."""
