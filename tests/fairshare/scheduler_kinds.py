"""Every kind that the controller reads or writes, with those of the fake scheduler."""

from __future__ import annotations

from fairshare.targets.installed import kinds
from gputally.testing.fake_scheduler import POD_GROUP, QUEUE, SETUP

KINDS = tuple(dict.fromkeys((*kinds(), QUEUE, SETUP, POD_GROUP)))
