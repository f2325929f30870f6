"""The accountant: the ledger of GPU-hours and cost, its windows, statements and reports.

A batch comes in through `api.ingest_and_policy_routes` and `runtime.ingest`, and `storage` books it. What `inventory`
reads of nodes, namespaces and pods is written too, and so are policies, controllers' decisions and the acts of
`bookkeeping`. Everything else reads: it opens a moment of the ledger (`ledger.protocols.Moment`) and asks it. `billing`
prices the usage that a moment answers, `bookkeeping` closes months on it, `reports` and `exports` write it, `api`,
`web`, `assistant` and `compat` (the APIs of other programs) show it, `notifications` delivers it, `lake` publishes it
as tables, and `fleet` asks the lakes of several ledgers. The windows that controllers read are
`storage.query.window_query`. `runtime.background_tasks` lists what runs beside requests, and `composition` puts the
parts together. CONTRIBUTING.md follows one GPU-minute through these packages.

The controller imports only `accountant.wire`."""
