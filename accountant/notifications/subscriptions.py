"""Defines the deliveries file (which reports and notices the operator wants and where they go), and the journal entries
about attempts to deliver one.

An example of the file:

schema: 1
link: https://gputally.example.com           # URL of the pages (default: public_url)
destinations:
  archive: {folder: /var/lib/gputally/reports}
  finance: {smtp: {server: mail.example.com:587, from: gputally@example.com, to: [finance@example.com],
                   user: gputally, password_file: /etc/gputally/smtp/password}}
  vision:  {msteams: {url_file: /etc/gputally/chat/vision}}
reports:
  - {of: month, forms: [pdf, csv], to: [finance, archive]}       # the cluster's, once the month is closed
  - {of: month, each_team: true, forms: [pdf], to: [archive]}    # one for every team
  - {of: week, team: vision, to: [vision]}                       # a chat gets the headline and a link
notices:
  - {about: [budgets, anomalies], teams: [vision], to: [vision]}

A journal entry (`sending`) is written before a message is sent, and another with the outcome afterwards. An attempt
that failed is repeated at growing intervals for three days. An attempt with an unknown outcome is not repeated, because
the message may have arrived. (The outcome is unknown if the process died, or if the connection broke after the message
was handed over.) An administrator can have it sent again."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter, model_validator

from accountant.channels.protocol import SEAM, Channel, ChannelPlugin, Message, Refused
from accountant.exports.format_field import OrderedFormat
from accountant.exports.protocol import default_format, exports
from accountant.ledger.journal import Act, NewAct
from gputally.base.background_tasks import error_summary
from gputally.base.plugins import MOST_LOADING_S, BrokenPlugin, NoPlugin, named, usable, within
from gputally.base.units import MS_PER_DAY, MS_PER_HOUR, MS_PER_SECOND
from gputally.server.config_loading import Model

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Team = Annotated[str, Field(min_length=1, max_length=253)]


@dataclass(frozen=True, slots=True)
class Destination:
    """A destination of messages: a channel with its settings."""

    channel: ChannelPlugin[Any]
    settings: Model

    def open(self) -> Channel:
        """The channel, ready to deliver."""
        return self.channel.open(self.settings)

    def content(self) -> dict[str, Any]:
        """What the file says, with every default."""
        return {self.channel.name: self.settings.model_dump(mode="json", by_alias=True)}


def destination(content: object) -> Destination:
    """The destination that the file describes: one word, which names a channel, and the channel's settings. Raises
    ValueError."""
    if not isinstance(content, Mapping) or len(content) != 1:
        raise ValueError(f"give exactly one channel: {' or '.join(sorted(usable(SEAM, ChannelPlugin)))}")
    ((name, _),) = content.items()
    try:
        channel = named(SEAM, ChannelPlugin, str(name))
    except BrokenPlugin as error:
        return _broken(name, content, str(error))
    except NoPlugin as error:
        raise ValueError(str(error)) from error
    # The adapter of a mapping gives faults of the settings their place, which begins with the word.
    model = TypeAdapter(dict[str, channel.settings])  # type: ignore[name-defined]
    try:
        return Destination(channel, within(MOST_LOADING_S, lambda: model.validate_python(dict(content))[name]))
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - code of others: whatever it does, the other destinations go on
        return _broken(name, content, f"the settings of {name} cannot be checked: {error_summary(error)}")


class _Unread(Model):
    """The settings of a channel that cannot be used."""

    model_config = ConfigDict(frozen=True, extra="allow")


@dataclass(frozen=True, slots=True)
class _BrokenChannel:
    """Refuses every message with the reason, so that each is recorded, tried again and at last given up."""

    fault: str

    def deliver(self, message: Message) -> str:  # noqa: ARG002
        raise Refused(self.fault)


def _broken(name: str, content: Mapping[str, object], fault: str) -> Destination:
    """The destination of a channel that cannot be used. The others go on."""
    import structlog  # clients load this module too, and not the logs of servers

    structlog.get_logger("accountant.notifications").error("channel_left_out", channel=name, fault=fault)
    said = content[name]
    settings = _Unread.model_validate(said if isinstance(said, dict) else {"": said})
    channel = ChannelPlugin(name, _Unread, lambda _: _BrokenChannel(fault), files=False, reaches="", page="")
    return Destination(channel, settings)


class ReportOrder(Model):
    """A subscription to a report of every month or week."""

    of: Literal["month", "week"] = "month"
    when: Literal["closed", "ended"] = "closed"
    """When a month's report is sent: once the month is closed, or after its grace period. A week's report is sent after
    its end in both cases."""
    team: Team | None = None
    """None: the report of the whole cluster."""
    each_team: bool = False
    """One report for every team with a billed amount, or with a correction, a credit or a charge, in the span."""
    forms: tuple[OrderedFormat, ...] = Field(
        default_factory=lambda: (default_format("pdf", "html"),), min_length=1, validate_default=True
    )
    to: tuple[Name, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_scope(self) -> ReportOrder:
        if self.each_team and self.team is not None:
            raise ValueError("give team or each_team, not both")
        of_months = [form for form in self.forms if form in exports() and exports()[form].charges]
        if of_months and self.of != "month":
            raise ValueError(f"{of_months[0]} is only for a month, and this report covers a {self.of}: write of: month")
        return self


class NoticeOrder(Model):
    """A subscription to notices that a budget reached a threshold (`budgets`), or that a team's GPU time of a day was
    far above the usual (`anomalies`)."""

    about: tuple[Literal["budgets", "anomalies"], ...] = Field(min_length=1)
    teams: tuple[Team, ...] | None = None
    """None: notices about all teams, and about budgets of queues."""
    to: tuple[Name, ...] = Field(min_length=1)


class DeliveriesFile(Model):
    """The content of the deliveries file. link: URL of the pages; None: the setting `public_url`."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    link: str | None = Field(default=None, pattern=r"^https?://[^\s?#]+$")
    destinations: dict[
        Name, Annotated[Destination, PlainValidator(destination), PlainSerializer(Destination.content)]
    ] = Field(default_factory=dict)
    reports: tuple[ReportOrder, ...] = ()
    notices: tuple[NoticeOrder, ...] = ()

    @model_validator(mode="after")
    def _known(self) -> DeliveriesFile:
        kinds: tuple[tuple[str, tuple[ReportOrder | NoticeOrder, ...]], ...] = (
            ("reports", self.reports),
            ("notices", self.notices),
        )
        for kind, deliveries_file in kinds:
            for index, order in enumerate(deliveries_file):
                for place, name in enumerate(order.to):
                    if name not in self.destinations:
                        fault = ValueError(f"`destinations` has no {name!r}")
                        fault.path = (kind, index, "to", place)  # type: ignore[attr-defined]  # read by yaml_file
                        raise fault
        return self

    def teams(self) -> dict[tuple[str | int, ...], str]:
        """The teams that the file names, by their place in it."""
        places: dict[tuple[str | int, ...], str] = {}
        for index, report in enumerate(self.reports):
            if report.team is not None:
                places["reports", index, "team"] = report.team
        for index, notice in enumerate(self.notices):
            for number, team in enumerate(notice.teams or ()):
                places["notices", index, "teams", number] = team
        return places

    def without(self, teams: Collection[str]) -> DeliveriesFile:
        """The file without what it orders about these teams."""
        reports = tuple(order for order in self.reports if order.team not in teams)
        kept = [
            order if order.teams is None
            else order.model_copy(update={"teams": tuple(team for team in order.teams if team not in teams)})
            for order in self.notices
        ]  # fmt: skip
        notices = tuple(order for order in kept if order.teams != ())
        return self.model_copy(update={"reports": reports, "notices": notices})


Outcome = Literal["sending", "delivered", "refused", "unsure", "given-up", "again"]
FIRST_PAUSE_MS: Final = 60 * MS_PER_SECOND
LONGEST_PAUSE_MS: Final = 6 * MS_PER_HOUR
PATIENCE_MS: Final = 3 * MS_PER_DAY
"""How long a delivery is tried before it is given up and a person has to decide."""
WHO: Final = "accountant"
_MOST_DETAIL = 400


@dataclass(frozen=True, slots=True)
class Delivery:
    """The state of delivering one message to one destination.

    key: identifies message and destination, the same for every attempt.
    tries: number of attempts, since the last `again` if there was one."""

    key: str
    outcome: Outcome
    tries: int
    first_ms: int
    last_ms: int
    detail: str = ""

    @property
    def due_ms(self) -> int | None:
        """The time of the next attempt; None: no further automatic attempt."""
        if self.outcome == "again":
            return self.last_ms
        if self.outcome != "refused":
            return None
        return self.last_ms + min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS << min(self.tries - 1, 20))


def next_attempt(before: Delivery | None, key: str, outcome: Outcome, at_ms: int, detail: str = "") -> Delivery:
    """The delivery after an event with this outcome. before: None if the message was never sent."""
    if before is None or outcome == "again":
        return Delivery(key, outcome, int(outcome != "again"), at_ms, at_ms, detail)
    tries = before.tries + (outcome == "sending")
    first = at_ms if before.outcome == "again" else before.first_ms
    return replace(before, outcome=outcome, tries=tries, first_ms=first, last_ms=at_ms, detail=detail)


def outcome_of_refusal(before: Delivery, at_ms: int) -> Outcome:
    """The outcome of a refused attempt: `refused` if it is tried again, otherwise `given-up`."""
    return "given-up" if at_ms - before.first_ms >= PATIENCE_MS else "refused"


def act(delivery: Delivery, who: str = WHO) -> NewAct:
    """The journal entry that records an attempt to deliver."""
    content = json.dumps({"outcome": delivery.outcome})
    return NewAct(delivery.last_ms, "delivery", delivery.key, who, delivery.detail[:_MOST_DETAIL], content)


def deliveries_from_acts(acts: Iterable[Act]) -> dict[str, Delivery]:
    """The deliveries by key, in the order of the first act about each."""
    deliveries: dict[str, Delivery] = {}
    for entry in acts:
        outcome: Outcome = json.loads(entry.content)["outcome"]
        deliveries[entry.subject] = next_attempt(
            deliveries.get(entry.subject), entry.subject, outcome, entry.at_ms, entry.reason
        )
    return deliveries
