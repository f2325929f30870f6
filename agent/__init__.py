"""The per-node agent: meters every GPU and finds which pod holds it.

`agent.gpu_readers` reads the GPU driver, `agent.holders` the kubelet and the API server. `agent.metering` turns
readings into intervals, `agent.upload` sends them. The accountant imports `agent.wire` alone."""
