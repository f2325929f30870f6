"""Opens the tables of one ledger in the lake, and makes sure that they and the ledger belong together.

The ledger's first publication records the act `lake` with a random id, the ledger's name in the lake and the warehouse.
Everything in the lake carries this id. Tables that have another id, or know more acts or earlier records than the
ledger, are refused, because then the lake or the ledger is not what it was (LakeRefused)."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from accountant.core.errors import LakeRefused, LakeUnavailable, UnreadableLedger
from accountant.core.periods import utc
from accountant.lake import tables
from accountant.lake.iceberg_catalog import Catalogue, namespace_of
from accountant.lake.lake_ledger import readable
from accountant.ledger.journal import Act, ActKind, Journal, NewAct, record
from accountant.ledger.protocols import ReadableLedger
from gputally.base.clock import Clock


class OwnLedger(ReadableLedger, Journal, Protocol):
    """A ledger that is published: a reader of moments that takes acts, and knows what has arrived."""

    def outboxes(self) -> Mapping[tuple[str, str, str], int]:
        """How far every outbox's records are committed, by (cluster, node, epoch). No number ever falls."""
        ...

    def require_present(self, now_ms: int) -> None:
        """Raises LedgerUnavailable if `now_ms` may not be the present time."""
        ...


class OwnTables:
    """The tables of one ledger in the lake.

    name, warehouse: where the ledger is published.
    connect: opens the lake; called on first use, and after the lake was refused.
    alone: only one thread writes or removes."""

    def __init__(
        self, ledger: OwnLedger, name: str, warehouse: str, clock: Clock, connect: Callable[[], Catalogue]
    ) -> None:
        self._ledger, self._clock, self._connect = ledger, clock, connect
        self.name, self._warehouse = name, warehouse
        self._opened: Catalogue | None = None
        self._left_former_names = False
        self.alone = threading.RLock()

    def repair(self, who: str, reason: str) -> None:
        """Opens the lake anew, begins it if it is missing, and records that `who` makes it equal to the ledger. Raises
        LakeRefused if the tables belong to a ledger with another id."""
        self._opened = None  # opened again after a failure
        self._opened = self._open(repair=True)
        self._record(self.id(), who, reason)

    @property
    def catalogue(self) -> Catalogue:
        if self._opened is None:
            with self.alone:
                if self._opened is None:  # two claims at one time would refuse each other's commits
                    self._opened = self._open(repair=False)
        return self._opened

    def id(self) -> str:
        """The id that the ledger got when it was published first."""
        found: str = json.loads(self._acts("lake")[0].content)["id"]
        return found

    def leave_former_names(self) -> None:
        """Notes in the row of each former name under which name the ledger is published now. A reader that can open
        none of the tables under the new name then still knows whose the former figures are."""
        if self._left_former_names:
            return
        acts = self._acts("lake")
        renamed_ms = acts[-1].at_ms
        for act in reversed(acts):
            if act.subject != self.name:
                break
            renamed_ms = act.at_ms
        is_left = True
        for name in sorted({act.subject for act in acts} - {self.name}):
            try:
                self._leave(namespace_of(name), renamed_ms)
            # Its tables may be out of reach of this name's credentials, or have what this ledger lacks.
            except (LakeUnavailable, UnreadableLedger) as error:
                structlog.get_logger("accountant.lake").warning("former_name_not_left", ledger=name, reason=str(error))
                is_left = False
        self._left_former_names = is_left

    def _leave(self, namespace: str, renamed_ms: int) -> None:
        """Raises LakeUnavailable, also if this ledger lacks anything that is published there: then it is a copy of one
        that goes on under that name. Raises UnreadableLedger."""
        catalogue = self.catalogue
        for row in catalogue.read(tables.LEDGERS, namespace) if catalogue.has(tables.LEDGERS, namespace) else ():
            with readable(str(row["ledger"]), str(row["version"] or "")):
                if row["id"] == self.id() and row["until_ms"] <= renamed_ms and row["renamed_to"] != self.name:
                    self._require_whole(catalogue, namespace)
                    catalogue.leave(namespace, {**row, "renamed_to": self.name})

    def _open(self, *, repair: bool) -> Catalogue:
        """Opens the lake and claims this ledger's tables. Begins a lake only if the ledger has not published there yet,
        or to repair it. A ledger that is refused has written nothing, so it stops no accountant that publishes rightly.

        The id is recorded before the claim, so that tables with a claim always belong to a ledger that knows its id."""
        catalogue, known = self._connect(), self._acts("lake")
        is_new = not known or (known[-1].subject, json.loads(known[-1].content)["warehouse"]) != self._place
        ledger_id = self.id() if known else uuid.uuid4().hex
        if is_new or repair:
            catalogue.begin()
        catalogue.require_own(ledger_id)
        if not repair:
            self._require_whole(catalogue)
            catalogue.begin()  # what this version adds to the tables of an earlier one
        if is_new:
            self._record(ledger_id, "accountant", "the ledger is published for the first time under this name")
        catalogue.claim(ledger_id)
        return catalogue

    @property
    def _place(self) -> tuple[str, str]:
        """The name and the warehouse under which the ledger is published."""
        return self.name, self._warehouse

    def _record(self, ledger_id: str, who: str, reason: str) -> None:
        content = json.dumps({"id": ledger_id, "warehouse": self._warehouse})
        record(self._ledger, [NewAct(self._clock.wall_ms(), "lake", self.name, who, reason, content)], None)

    def _require_whole(self, catalogue: Catalogue, namespace: str = "") -> None:
        """Raises LakeRefused if the ledger lacks acts or old records that the lake has, and LakeUnavailable while it
        lacks records that agents may send again. Only reads.

        namespace: where the ledger was published; "": under its present name."""
        cure = (
            "If the ledger was lost or an old backup was restored, restore the newest backup and the archive. If the "
            "ledger is right, `gputally accountant check --lake --repair` makes the lake equal to it"
        )
        lacked = self._lacked_act(catalogue.read(tables.ACTS, namespace))
        if lacked is not None:
            raise LakeRefused(
                f"{catalogue.place}: act {lacked} of the ledger {self.name} in the lake is not in the "
                f"ledger (its last act is {self._ledger.status().last_act}), so nothing was published. {cure}"
            )
        for row in catalogue.read(tables.LEDGERS, namespace):
            # The acts of this row, not of the table `acts`, which is written earlier than the row.
            removing = self._acts("withdrawn", "redated", "retired", "moved")
            if any(act.number > row["acts"] for act in removing):
                continue  # the ledger's records became fewer by an act
            status = self._ledger.status()
            first_ms, newest_ms = status.extent
            if row["first_ms"] and (not first_ms or row["first_ms"] < first_ms):
                begins = f"begins at {utc(first_ms)}" if first_ms else "has no records"
                raise LakeRefused(
                    f"{catalogue.place}: in the lake the ledger {self.name} begins at {utc(row['first_ms'])}, and the "
                    f"ledger {begins}, so nothing was published. {cure}"
                )
            newest = {"": newest_ms, **status.newest_by_cluster}
            published = {"": row["newest_ms"], **json.loads(row["clusters"])}
            behind = sorted(name for name, at_ms in published.items() if newest.get(name, 0) < at_ms)
            if behind:
                ends = f"end at {utc(newest_ms)}" if behind == [""] else f"of cluster {behind[-1]} end earlier"
                raise LakeUnavailable(
                    f"{catalogue.place}: in the lake the records of the ledger {self.name} end at "
                    f"{utc(row['newest_ms'])}, and in the ledger those {ends}. Nothing is published until the agents "
                    f"have sent again what is missing. {cure}"
                )

        outboxes = self._ledger.outboxes()
        fewer = [
            row for row in (
                catalogue.read(tables.OUTBOXES, namespace) if catalogue.has(tables.OUTBOXES, namespace) else ()
            )
            if outboxes.get((row["cluster"], row["node"], row["epoch"]), 0) < row["number"]
        ]  # fmt: skip
        if fewer:
            row = fewer[0]
            raise LakeUnavailable(
                f"{catalogue.place}: the lake has records of {len(fewer)} outboxes that the ledger {self.name} lacks, "
                f"among them those of node {row['node']} in cluster {row['cluster']} up to number {row['number']}. "
                f"Nothing is published until the agents have sent them again. {cure}"
            )

    def _lacked_act(self, published: Sequence[dict[str, Any]]) -> int | None:
        """The number of the newest published act if the ledger does not have it. published: rows of the table
        `acts`."""
        last = max(published, key=lambda row: row["number"], default=None)
        if last is None:
            return None
        with self._ledger.moment() as moment:
            own = moment.acts(after=last["number"] - 1, limit=1)
        return None if own and own[0].digest == last["digest"] else int(last["number"])

    def _acts(self, *kinds: ActKind) -> list[Act]:
        with self._ledger.moment() as moment:
            return moment.acts(*kinds)
