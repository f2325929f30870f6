"""A month in the form of FOCUS, the FinOps Open Cost and Usage Specification (focus.finops.org).

`charges` cuts a statement into charges, `bundle` writes them as FOCUS 1.4's three data sets, `projection` as the one
table of FOCUS 1.2. What stands in which column: docs/reports.md.
"""
