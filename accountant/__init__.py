"""The accountant: the ledger of GPU-hours and cost, its windows, statements and reports.

Other packages import only `accountant.wire`."""
