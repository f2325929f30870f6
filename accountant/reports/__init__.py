"""Builds monthly reports: tables, charts, HTML, PDF, workbook and FOCUS export."""
