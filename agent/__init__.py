"""The per-node agent: meters every GPU and knows who holds it.

Other stages import only its published language: `agent.wire`, `gputally.base.units`, `gputally.base.clock`,
`gputally.base.yaml_file` and `gputally.base.pod_queue_labels`. Its rooms: `agent.devices` (what the GPU driver says),
`agent.holders` (what the kubelet and the API server say), `agent.commands` (the table people watch); the rest is the
chain from a reading to an interval that arrived.
"""
