"""The accountant: the ledger of GPU-hours and cost, its windows, statements and reports.

Other stages import only its published language: `accountant.wire` and `accountant.yamlfile`.
"""
