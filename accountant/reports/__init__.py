"""Builds reports of months and other spans: their data, tables, charts and page. accountant.exports writes them as
files."""
