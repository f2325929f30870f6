"""The accountant: the ledger of GPU-hours and cost, its windows, statements and reports.

A batch comes in through `api.ingest_and_policy_routes` and `runtime.ingest`, and `storage` books it. Everything else
only reads: it opens a moment of the ledger (`ledger.protocols.Moment`) and asks it. `billing` prices the usage that a
moment answers, `bookkeeping` closes months on it, `reports` and `exports` write it, `api`, `web` and `assistant` show
it. `runtime.background_tasks` lists what runs beside requests, and `composition` puts the parts together.

The controller imports only `accountant.wire`."""
