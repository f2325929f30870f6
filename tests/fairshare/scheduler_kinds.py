"""Every kind that the controller reads or writes."""

from __future__ import annotations

from fairshare.targets.installed import kinds

KINDS = kinds()
