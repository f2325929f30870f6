"""The accountant: the ledger of GPU-hours and cost, its windows, statements and reports.

The controller imports only `accountant.wire`."""
