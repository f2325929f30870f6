"""Objects of KAI as that program and its administrators write them, and a text that expands to too much."""

from __future__ import annotations

ALIASES = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 9)]
)
"""Nine lines of YAML that expand to 134 million values."""
KAI_QUEUE = {
    "apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": "a"},
    "spec": {"resources": {"gpu": {"quota": 8, "overQuotaWeight": 1, "limit": -1}}},
}  # fmt: skip
DATABASE = {"clientType": "prometheus", "connectionString": "http://usage:9091"}
ARGUMENTS = {"plugins": {"proportion": {"arguments": {"other": "1"}}}}
