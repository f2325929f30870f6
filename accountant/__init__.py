"""The accountant: the ledger of GPU-hours and cost, its windows, statements and reports.

Other stages import only what it publishes: its language (`wire`, `preempting`, `yamlfile`), who may ask (`auth`), and
how pages look and tell (`figures`, `web.look`, `web.reasons`, `reports.svg`).
"""
