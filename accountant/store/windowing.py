"""Windows."""

from __future__ import annotations


class WindowCache:
    def __init__(self, zone):
        pass

    def forget(self, booked):
        pass

    def forget_all(self):
        pass
