"""Clocks, and the accountant's door. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gputally.doctor.model import Finding, Seen

MS = 1_000
TOLERATED_MS = 2_000
"""Skew that is worth nobody's time."""
REFUSED_MS = 5 * 60_000
"""An accountant quarantines rows that end further ahead of its clock (accountant.store.writing.validation.SKEW_MS)."""


@dataclass(frozen=True, slots=True)
class Told:
    """What time another machine said it was. own_ms: ours when the answer came; took_ms: since the question. Its
    `Date` is cut to whole seconds, so that skew is known to a second and the way there and back."""

    who: str
    their_ms: int
    own_ms: int
    took_ms: int

    @property
    def least_skew_ms(self) -> int:
        """What it is off by at least; positive where it is ahead of us."""
        late = self.their_ms - self.own_ms  # its moment lies within [their, their + 1 s), ours within [own - took, own]
        return late if late > 0 else min(0, late + MS + self.took_ms)


def clocks(told: tuple[Told, ...]) -> Seen:
    """This machine's clock against the others'."""
    findings = []
    for each in told:
        skew = each.least_skew_ms
        if abs(skew) <= TOLERATED_MS:
            continue
        how = "ahead of" if skew < 0 else "behind"
        effect = ": agents' records would be quarantined as future-dated" if skew < -REFUSED_MS else ""
        findings.append(
            Finding(
                "error" if abs(skew) > REFUSED_MS else "warning",
                f"this clock is {how} the {each.who}'s{effect}",
                f"by at least {abs(skew) / MS:.1f} s",
                "timedatectl set-ntp true   # on the machine whose clock is wrong",
            )
        )
    words = ", ".join(f"{each.who} within {max(MS, abs(each.their_ms - each.own_ms)) / MS:.0f} s" for each in told)
    return Seen(words, tuple(findings))


@dataclass(frozen=True, slots=True)
class Knock:
    """What the accountant answered. ready, asked: HTTP status of /readyz and of a question that wants a token, 0
    without an answer; why: its words, or the network's."""

    url: str
    ready: int
    asked: int
    why: str = ""


def accountant(knock: Knock) -> Seen:
    """Whether it is there, can read its ledger, and lets us in."""
    seen = f"{knock.url}: /readyz {knock.ready or 'no answer'}, a question {knock.asked or 'no answer'}"
    if not knock.ready:
        remedy = "kubectl -n gputally-system get pods -l app.kubernetes.io/component=accountant; give --url"
        return Seen(seen, (Finding("error", "the accountant does not answer", f"{knock.url}: {knock.why}", remedy),))
    findings = []
    if knock.ready != 200:
        remedy = "kubectl -n gputally-system logs statefulset/gputally-accountant"
        findings.append(Finding("error", "the accountant cannot read its ledger", knock.why or seen, remedy))
    if knock.asked == 401:
        remedy = "give --token-file; `gputally accountant token new --name me --scope read` makes one"
        findings.append(Finding("error", "the accountant does not know this caller", knock.why, remedy))
    elif knock.asked == 403:
        remedy = "use a token of scope read, or bind the group in callers.yaml (docs/security.md)"
        findings.append(Finding("error", "this caller may not read the books", knock.why, remedy))
    elif knock.asked != 200 and knock.ready == 200:
        remedy = "kubectl -n gputally-system logs statefulset/gputally-accountant"
        findings.append(Finding("error", "the accountant does not answer a question", knock.why or seen, remedy))
    return Seen(seen, tuple(findings))
