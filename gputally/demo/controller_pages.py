"""The pages of the demo's controller, in the process of the demo's accountant, so that both have one address.

The controller itself runs in the demo's main process, which sends the report of every cycle."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

from starlette.types import ASGIApp

from accountant.wire.policy_models import Policy
from fairshare.controller.cycle_report import CycleReport
from fairshare.controller.policy_file import PolicyLocation
from fairshare.explain.what_if_simulation import Comparison
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web.page_authentication import PageAuthentication
from fairshare.web.page_routing import PageContext, PagesApp
from fairshare.web.policy_form import policy_text
from fairshare.web.policy_pages import ROUTES
from fairshare.web.queue_history import QueueHistory, ReportCache
from fairshare.web.what_if_worker import Cancelled, PreviewOrder, Previews, ProgressCallback, compare
from gputally.base.clock import Clock
from gputally.base.units import MS_PER_HOUR, MS_PER_SECOND

_HEADING = "# The policy of the demo: who is due how much of the cluster.\n"


class _DemoPolicy(PolicyLocation):
    """The demo's policy, whose file is in a folder that ends with the demo."""

    @property
    def path(self) -> str:
        return "the demo's policy"


class ControllerPages:
    """The pages. app: the ASGI application."""

    def __init__(self, policy: Policy, folder: Path, url: str, clock: Clock) -> None:
        """folder: of the policy's file. url: the accountant's address."""
        self._policy = policy
        self._url = url
        self._reports = ReportCache()
        file = folder / "policy.yaml"
        file.write_text(
            policy_text(policy.model_dump(mode="json", by_alias=True, exclude_defaults=True), _HEADING),
            encoding="utf-8",
        )
        with ExitStack() as stack:
            client = stack.enter_context(AccountantApi(url))
            previews = Previews(self._preview)
            stack.callback(previews.close)
            context = PageContext(
                self._reports, QueueHistory(client, clock), previews, _DemoPolicy(file), clock,
                MS_PER_HOUR / MS_PER_SECOND, accountant="/",
            )  # fmt: skip
            self.app: ASGIApp = PagesApp(context, PageAuthentication(None), ROUTES).observed()
            self._stack = stack.pop_all()

    def show(self, report: CycleReport) -> None:
        """Show a cycle."""
        self._reports.observe(report, self._policy)

    def close(self) -> None:
        """Stop a preview that runs."""
        self._stack.close()

    def _preview(self, order: PreviewOrder, progress: ProgressCallback, stop: threading.Event) -> Comparison:
        """Make a preview in this process, because a worker process of the demo cannot start another."""

        def told(part: float, doing: str) -> None:
            if stop.is_set():
                raise Cancelled
            progress(part, doing)

        with AccountantApi(self._url) as client:
            return compare(order, client, told)
