"""Inventory facts as stored: one JSON text per node, canonical so that equal facts are equal texts."""

from __future__ import annotations

import msgspec

from accountant.ledger import NodeFacts

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(NodeFacts)


def node_text(facts: NodeFacts) -> str:
    return _encoder.encode(facts).decode()


def node_from_text(text: str) -> NodeFacts:
    return _decoder.decode(text)
