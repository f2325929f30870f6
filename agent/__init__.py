"""The per-node agent: meters every GPU and finds which pod holds it.

Read in this order:

1. `main_loop.Agent.sample`: one turn. It asks one `Source` for a snapshot of the node, meters it, and stores the closed
   rows.
2. `node_reader.NodeSource`: this source. It joins what the GPUs say (`gpu_readers.chosen.GpuReaders`) with who holds
   them (`holders`).
3. `metering.meter.Meter.observe`: readings of two instants and their holders become rows of usage.
4. `upload.spool.Outbox`: the rows of one node in order, on its disk (`spool_file`).
5. `upload.uploader.Uploader.ship`: sends them as a `wire.Batch` until the accountant has stored them.

`composition` puts the parts together. The accountant imports `agent.wire` alone. CONTRIBUTING.md follows
one GPU-minute from here to the report of its month."""
