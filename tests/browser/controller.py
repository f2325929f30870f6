"""The controller's pages over what the demo's controller did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accountant.wire.policy_models import Policy
from fairshare.controller.policy_file import PolicyFileWriter, PolicyLocation
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web.page_authentication import PageAuthentication
from fairshare.web.page_routing import PageContext, PagesApp, link
from fairshare.web.policy_form import policy_text
from fairshare.web.policy_pages import ROUTES
from fairshare.web.queue_history import History, ReportCache
from fairshare.web.what_if_worker import PreviewOrder, Previews, Worker
from gputally.base.clock import VirtualClock
from gputally.server.https_server import serve
from tests.fairshare.web.staging import settled

HEADING = "# Who is due how much of the cluster, and how the past counts.\n"


@dataclass(frozen=True)
class ControllerPages:
    """url: of the pages. policy: the file they edit. pages: by name."""

    url: str
    policy: Path
    pages: dict[str, str]


@contextlib.contextmanager
def controller_pages(
    folder: Path, scene: ReportCache, policy: Policy, accountant: str, now_ms: int, days: int
) -> Iterator[ControllerPages]:
    """Serve them until the block ends; with a preview of `days` that is done."""
    file = folder / "policy.yaml"
    file.write_text(policy_text(policy.model_dump(mode="json", by_alias=True, exclude_defaults=True), HEADING))
    clock = VirtualClock(now_ms)
    with AccountantApi(accountant) as client, contextlib.ExitStack() as after:
        previews = Previews(Worker(partial(AccountantApi, accountant)))
        after.callback(previews.close)
        place = PolicyLocation(file, PolicyFileWriter(file))
        house = PageContext(scene, History(client, clock), previews, place, clock, 3600.0, accountant=accountant)
        url = after.enter_context(serve(PagesApp(house, PageAuthentication(None), ROUTES).observed(), "127.0.0.1", 0))
        other = policy.model_copy(update={"k": policy.k / 2, "queues": tuple(_heavier(policy))})
        text = policy_text(other.model_dump(mode="json", by_alias=True, exclude_defaults=True), HEADING)
        key = previews.start(PreviewOrder(policy, other, days, now_ms), text, edited=True)
        found = settled(previews, key, calm_s=120)
        assert found.state == "done", found.fault
        first = policy.queues[0].name
        weight = next(
            each
            for each in client.decisions(now_ms - days * 86_400_000, now_ms + 1)
            if each.kind == "weight" and each.subject != "*"
        )
        pages = {
            "shares": "/",
            "queue": link("/queue/", first),
            "fairshare-decisions": "/decisions",
            "fairshare-decision": link("/decision", id=weight.id, at=str(weight.at_ms)),
            "policy": "/policy",
            "preview": link("/preview/", key),
        }
        yield ControllerPages(url, file, {name: url + path for name, path in pages.items()})


def _heavier(policy: Policy) -> Iterator[object]:
    """The same queues, the first with twice its weight."""
    for number, queue in enumerate(policy.queues):
        yield queue.model_copy(update={"weight": queue.weight * 2}) if number == 0 else queue
