"""TLS of the accountant's listeners: our certificate, renewed without a restart, and client certificates.

A client certificate is verified by the TLS layer against its authorities; what reaches a request is its
subject's common name, as the ASGI TLS extension names it.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accountant.errors import AccountantError
from agent.wholefile import Stamp, stamp


class BadCertificate(AccountantError):
    """A certificate or key that cannot be used: the file and the reason."""


@dataclass(frozen=True, slots=True)
class Identity:
    """certificate, key: PEM files of ours. client_ca: PEM file of the authorities of client certificates,
    None: none are asked for."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class Tls:
    """The context all new connections use. Raises BadCertificate."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._stamp = self._stat()
        self._raised = ""
        """Why the files' newest pair could not be used when it was tried last."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()
        if identity.client_ca is not None:
            try:
                self.context.load_verify_locations(identity.client_ca)
            except OSError as error:
                raise BadCertificate(f"{identity.client_ca}: {error.strerror or error}") from error
            # Optional: people come with bearer tokens over the same port.
            self.context.verify_mode = ssl.CERT_OPTIONAL

    def look(self) -> bool:
        """Use the certificate for new connections if its files changed, or could not be used the last time; True
        where it is another one now.

        Raises BadCertificate for a pair that cannot be used, once; the one in use stays, and the new one is tried again
        at each look."""
        found = self._stat()
        if found == self._stamp and not self._raised:
            return False
        try:
            # Tried aside first: half a new pair must not replace a good one.
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._identity)
            self._load()
        except BadCertificate as error:
            told = self._raised if found == self._stamp else ""
            self._stamp, self._raised = found, str(error)
            if self._raised == told:
                return False
            raise
        self._stamp, self._raised = found, ""
        return True

    @property
    def refused(self) -> bool:
        """Whether the files' newest pair is not in use."""
        return bool(self._raised)

    def _load(self) -> None:
        _load(self.context, self._identity)

    def _stat(self) -> tuple[Stamp | None, Stamp | None]:
        return stamp(self._identity.certificate), stamp(self._identity.key)


def _load(context: ssl.SSLContext, identity: Identity) -> None:
    try:
        context.load_cert_chain(identity.certificate, identity.key)
    except ssl.SSLError as error:
        raise BadCertificate(
            f"{identity.certificate}, {identity.key}: not a certificate and its key: {error.reason}"
        ) from error
    except OSError as error:
        raise BadCertificate(f"{identity.certificate}, {identity.key}: {error.strerror}") from error


def common_name(certificate: Any) -> str:
    """Of the subject; "" where there is no verified certificate or it has none, or several."""
    names = [value for part in (certificate or {}).get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""
