"""Authenticates a request by the configured methods: bearer token, Kubernetes TokenReview, client certificate,
sign-in cookie.

The files are looked at again on request; a broken new version changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from accountant.core.settings import Settings
from gputally.base.clock import Clock
from gputally.base.errors import CannotStart
from gputally.kubernetes.list_watch import Api
from gputally.server import config_models
from gputally.server.config_models import WatchedFile
from gputally.server.openid_connect import Issuers
from gputally.server.request_limits import RateBound
from gputally.server.sign_in import CookieSigner, SignInService, key_in, key_of
from gputally.server.token_review import TokenReviews
from gputally.server.tokens_and_grants import (
    AllowAll,
    AnyOf,
    Authenticator,
    Callers,
    CurrentAuthenticator,
    FileToken,
    Principal,
    TokenFile,
)


class CallersFile:
    """report: called with the faults of a version that is not taken into force. api: the API server, asked
    for only where the callers file wants it. teams: those that exist. Raises FileFault for a bad first file, and
    CannotStart where people could not come back from signing in."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        report: Callable[[str], None],
        api: Callable[[], Api],
        teams: Callable[[], Collection[str]],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._api = api
        self._teams = teams
        self._tokens = TokenFile(settings.tokens, clock, report) if settings.tokens is not None else None
        self._callers: WatchedFile[Callers] | None = None
        if settings.callers is not None:
            self._callers = WatchedFile(
                settings.callers, lambda path: config_models.load_yaml(path, Callers), report, self._enforce
            )
        self._enforce(self._callers.current if self._callers is not None else Callers())
        self.authenticator: Authenticator = CurrentAuthenticator(lambda: self._way)

    def look(self) -> bool:
        """Put the callers file in force if it changed; True where it did. Raises CannotStart, each time, for one that
        cannot be."""
        return self._callers is not None and self._callers.look()

    def refused(self) -> dict[str, bool]:
        """File -> whether its newest version is not in force."""
        files = {"tokens file": self._tokens, "callers file": self._callers}
        return {name: file.refused for name, file in files.items() if file is not None}

    def _enforce(self, callers: Callers) -> None:
        way, people = self._composed(callers), self._signing_in(callers)
        self._way, self._people = way, people

    def people(self) -> SignInService | None:
        """Return the sign-in for the pages; None where sign-in is not configured."""
        return self._people

    def certified(self, common_name: str) -> Principal | None:
        """Return the principal of a client certificate, None if unknown."""
        if self._callers is None or not common_name:
            return None
        return self._callers.current.certified(common_name)

    def _composed(self, callers: Callers) -> Authenticator:
        if self._settings.auth == "off":
            return AllowAll()
        ways: list[Authenticator] = [] if self._tokens is None else [self._tokens]
        if self._settings.metrics_token is not None:
            ways.append(FileToken("prometheus", self._settings.metrics_token))
        if callers.issuers:
            ways.append(Issuers(callers.issuers, callers.grants, self._clock))
        if callers.kubernetes is not None:
            cluster = self._settings.kubernetes.cluster
            limits = self._settings.limits
            rate = RateBound(self._clock, limits.reviews_per_second, limits.reviews_burst)
            ways.append(
                TokenReviews(self._api(), self._clock, cluster, callers.kubernetes, callers.grants, self._teams, rate)
            )
        return AnyOf(*ways)

    def _signing_in(self, callers: Callers) -> SignInService | None:
        settings = self._settings
        if settings.auth == "off" or all(issuer.login is None for issuer in callers.issuers):
            return None
        if settings.public_url is None:
            raise CannotStart(f"{settings.callers}: people sign in with an issuer: set public_url, for the way back")
        return SignInService(
            callers,
            self._clock,
            CookieSigner(key_of(settings.session_key) if settings.session_key is not None else key_in(settings.data)),
            settings.public_url,
            settings.session,
        )
