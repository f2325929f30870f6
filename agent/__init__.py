"""The per-node agent: meters every GPU and knows who holds it.

Other stages import only its published language: `agent.wire`, `agent.units`, `agent.clock`
and `agent.yamlfile`.
"""
