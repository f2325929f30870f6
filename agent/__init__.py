"""The per-node agent: meters every GPU and finds which pod holds it.

`agent.gpu_readers` reads GPU drivers and exporters, `agent.holders` the kubelet, the API server and other sources of
holders. `agent.metering` turns readings into intervals, `agent.upload` stores and sends them, and `agent.main_loop`
runs these steps. The accountant imports `agent.wire` alone."""
