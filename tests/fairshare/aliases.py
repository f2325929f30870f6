"""A text that expands to too much."""

from __future__ import annotations

ALIASES = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 9)]
)
"""Nine lines of YAML that expand to 134 million values."""
