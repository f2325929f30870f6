"""The per-node agent: meters every GPU and finds which pod holds it.

Read in this order:

1. `main_loop.Agent.sample`: one turn. It asks for the holders (`holders.node_reader.NodeSource`) and for the readings
   (`gpu_readers.chosen.GpuReaders`), meters both, and stores the closed rows.
2. `metering.meter.Meter.observe`: readings of two instants and their holders become rows of usage.
3. `upload.spool.Outbox`: the rows of one node in order, on its disk (`spool_file`).
4. `upload.uploader.Uploader.ship`: sends them as a `wire.Batch` until the accountant has stored them.

`composition` puts the parts together. The accountant imports `agent.wire` alone."""
