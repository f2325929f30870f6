"""Builds the web application (queue and policy pages) from the controller's settings, and serves it.

jinja2 is imported only when pages are served, so a controller without pages does not load it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

import structlog

from fairshare.controller.policy_file import PolicyLocation, keeper
from fairshare.core.settings import Settings, address
from fairshare.http_server import LIMITS
from fairshare.usage.accountant_client import AccountantApi
from fairshare.web.page_authentication import PageAuthentication, SignIns
from fairshare.web.queue_history import History, ReportCache
from fairshare.web.what_if_worker import Previews, Source, Worker
from gputally.base.background_tasks import BackgroundTasks
from gputally.base.clock import Clock
from gputally.base.errors import ClusterError, FairshareError
from gputally.kubernetes.objects import CONFIG_MAP, Cluster, Event
from gputally.server.https_server import Identity, Tls, serve
from gputally.server.tokens_and_grants import TokenFile


class PagesMissing(FairshareError):
    """The libraries for pages are not installed."""


class NoCallers(FairshareError):
    """The files of tokens and callers admit no caller."""


@contextmanager
def pages(
    settings: Settings,
    scene: ReportCache,
    client: AccountantApi,
    clock: Clock,
    cluster: Cluster,
    tasks: BackgroundTasks | None = None,
) -> Iterator[str]:
    """Serve until the context ends; yields the base URL. tasks: the list of the listener's task.

    Raises CannotStart, PagesMissing, NoCallers, NoSessions, and FileFault for a bad token file or callers file."""
    if find_spec("jinja2") is None:
        raise PagesMissing("pages_listen: pages need jinja2: `pip install gputally` brings it")
    from fairshare.web.page_routing import PageContext, PagesApp
    from fairshare.web.policy_pages import ROUTES

    events = structlog.get_logger("fairshare.pages")

    def refused(event: str) -> Callable[[str], None]:
        def tell(fault: str) -> None:
            for line in fault.splitlines():
                events.error(event, fault=line)

        return tell

    def applied(who: str, before: str, now: str) -> None:
        events.warning("policy_applied", by=who, before=before, now=now, file=str(settings.policy))
        if settings.status_namespace:
            message = f"{who} applied policy {now} from the pages, in place of {before}"
            name, space = settings.status_name, settings.status_namespace
            try:
                cluster.event(Event(CONFIG_MAP, name, space, "", "Normal", "PolicyApplied", message, clock.wall_ms()))
            except ClusterError as error:
                events.warning("event_lost", fault=str(error))

    def told(method: str, path: str, status: int, seconds: float) -> None:
        level = "warning" if status >= 500 else "debug" if path.endswith("/state") else "info"
        getattr(events, level)(
            "page", method=method, path=path[:200], status=status, milliseconds=round(seconds * 1000)
        )

    tokens = (
        TokenFile(settings.pages_tokens, clock, refused("tokens_refused"))
        if settings.pages_tokens is not None
        else None
    )
    people = _sign_ins(settings, clock, refused("callers_refused"))
    if tokens is None and people is not None and people() is None:
        raise NoCallers(f"pages_callers: {settings.pages_callers}: no issuer has a login, so sign-in is impossible")
    tls = None
    if settings.pages_certificate is not None and settings.pages_key is not None:
        tls = Tls(Identity(settings.pages_certificate, settings.pages_key))
    place = PolicyLocation(settings.policy, keeper(settings.pages_apply, settings.policy, cluster))
    source = Source(settings.accountant, settings.token_file, settings.ca_file, settings.cluster_name)
    previews = Previews(Worker(source, settings.pages_memory_mib))
    context = PageContext(
        scene, History(client, clock), previews, place, clock,
        settings.interval, applied, settings.pages_accountant,
    )  # fmt: skip
    host, port = address(settings.pages_listen)
    site = PagesApp(context, PageAuthentication(tokens, people), ROUTES)
    ready = threading.Thread(target=site.make_ready, name="templates", daemon=True)
    with ExitStack() as open_:
        open_.callback(previews.close)
        url = open_.enter_context(
            serve(site.observed(told), host, port, tls, LIMITS, "fairshare-pages", tasks=tasks, renew=True)
        )
        ready.start()
        open_.callback(ready.join)
        events.info("pages", url=url, apply=settings.pages_apply, tokens=tokens is not None, sign_in=people is not None)
        yield url


def _sign_ins(settings: Settings, clock: Clock, report: Callable[[str], None]) -> SignIns | None:
    """Return the sign-in, None if it is not configured."""
    if settings.pages_callers is None or settings.pages_session_key is None:
        return None
    return SignIns(
        settings.pages_callers,
        settings.pages_session_key,
        settings.pages_public_url,
        settings.pages_session,
        clock,
        report,
    )
