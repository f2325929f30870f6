"""The published language as JSON Schema, for whoever speaks it in another language.

`python -m agent.schema > docs/schema/usage-batch.v1.json` writes it anew; a test keeps it fresh.
"""

from __future__ import annotations

import json
import sys

import msgspec

from agent.wire import SCHEMA, Batch


def usage_batch() -> str:
    """The schema of POST /v1/usage as indented JSON with a final newline; the same text every time."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://gputally.dev/schema/usage-batch.v{SCHEMA}.json",
        "title": f"gputally usage batch, version {SCHEMA}",
        **msgspec.json.schema(Batch),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(usage_batch())
