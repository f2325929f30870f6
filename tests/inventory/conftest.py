"""A ledger on a virtual clock that receives inventories."""

from __future__ import annotations

from tests.ledger.conftest import clock as clock
from tests.ledger.conftest import hand as hand
from tests.ledger.conftest import ledger as ledger
from tests.ledger.conftest import opened as opened
from tests.ledger.conftest import path as path
from tests.ledger.conftest import send as send
