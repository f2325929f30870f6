"""The per-node agent: meters every GPU and knows who holds it.

Other stages import only its published language: `agent.wire`, `agent.units`, `agent.clock`, `agent.yamlfile` and
`agent.queues`. Its rooms: `agent.driver` (what the GPU driver says), `agent.kube` (what the kubelet and the API server
say), `agent.live` (the table people watch); the rest is the chain from a reading to an interval that arrived.
"""
