"""What a failed call to the broker means, in words: foreign exceptions become ours here and nowhere else.

A broker of TLS 1.3 looks at the client's certificate only after the client's side of the handshake is
over, and refuses it by hanging up (or with an alert) at the first read. Seen from here that is a
connection which ends before the first answer, and the most likely reason is said: what an alert tells,
or what is to be seen in our own files. If neither tells, the broker may just as well be restarting.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp

from kubelend.core import durations
from kubelend.core.errors import (
    BrokerUnreachable,
    CertificateRefused,
    InvalidSettings,
    UnexpectedAnswer,
)
from kubelend.kits import keyfiles
from kubelend.transports import tls


class Peer:
    """The broker that is called, by its address, and the directory that vouches for both sides."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.has_answered = False
        """Once it has, our certificate is good: a broken connection has another reason."""

    def forget(self) -> None:
        """There is another certificate now, of which that is not known."""
        self.has_answered = False

    @contextlib.contextmanager
    def translated(self, timeout: timedelta) -> Iterator[None]:
        """Around each use of the HTTP library."""
        try:
            yield
        except TimeoutError as error:
            raise BrokerUnreachable(
                f"the broker at {self.url} did not answer within {durations.short(timeout)}",
                hint="try again, or allow more time",
            ) from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._distrusted(error.certificate_error) from error
        except aiohttp.ClientSSLError as error:
            raise self._no_handshake(error.os_error) from error
        except aiohttp.ClientConnectorError as error:
            raise self._not_connected(error) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise self._cut_off(error) from error
        except aiohttp.ClientError as error:
            raise UnexpectedAnswer(
                f"{self.url} does not answer as a broker does: {error}",
                hint="check address and port",
            ) from error

    def _distrusted(self, error: Exception) -> BrokerUnreachable:
        authorities = self.directory / "ca.crt"
        text = getattr(error, "verify_message", "") or str(error)
        if "mismatch" in text or "not valid for" in text:
            hint = (
                "use a name or address of the broker's certificate (`kubelend ca issue --dns/--ip`)"
            )
            return BrokerUnreachable(
                f"the certificate of {self.url} is not for that name", hint=hint
            )
        if "expired" in text or "not yet valid" in text:
            return BrokerUnreachable(
                f"the certificate of {self.url} is not valid now: {text}",
                hint="renew it, and check the clocks of both sides",
            )
        return BrokerUnreachable(
            f"the certificate of {self.url} is not signed by an authority in {authorities}",
            hint="put the ca.crt of this broker there, or check the address",
        )

    def _no_handshake(self, error: OSError) -> BrokerUnreachable:
        if _alert(error):
            return self._cut_off(error)
        return BrokerUnreachable(
            f"{self.url} does not speak TLS as a broker does: {_reason(error)}",
            hint="check address and port",
        )

    def _not_connected(self, error: aiohttp.ClientConnectorError) -> BrokerUnreachable:
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return BrokerUnreachable(
                f"the name in {self.url} is not known", hint="check the broker's address"
            )
        # A broker of TLS 1.2 refuses our certificate by hanging up during the handshake.
        if isinstance(error.os_error, ConnectionResetError):
            return self._cut_off(error)
        if isinstance(error.os_error, ConnectionRefusedError):
            return BrokerUnreachable(
                f"nothing listens at {self.url}",
                hint="start the broker, or give its address with --broker-url",
            )
        return BrokerUnreachable(
            f"no connection to {self.url}: {_reason(error.os_error)}",
            hint="check the broker's address and the network",
        )

    def _cut_off(self, error: Exception) -> BrokerUnreachable:
        if self.has_answered:
            return BrokerUnreachable(
                f"the broker at {self.url} closed the connection",
                hint="it may be restarting: try again",
            )
        alert, fault = _alert(error), self._own_fault()
        is_refused = fault or any(word in alert for word in _ABOUT_CERTIFICATES)
        kind = CertificateRefused if is_refused else BrokerUnreachable
        return kind(
            f"the broker at {self.url} hung up before its first answer{alert}:"
            f" {fault or f'it seems not to accept {self.directory / keyfiles.CERTIFICATE}'}",
            hint="get a certificate from this broker's authority (`kubelend ca issue`, or `kubelend join`)",
        )

    def _own_fault(self) -> str:
        """What can be judged from here: the dates of our certificate, and who has signed it."""
        certificate = self.directory / keyfiles.CERTIFICATE
        now = datetime.now(UTC)
        with contextlib.suppress(InvalidSettings):
            own = tls.own_certificate(self.directory)
            begin, end = own.not_valid_before_utc, own.not_valid_after_utc
            if end <= now:
                return f"{certificate} expired at {end:%Y-%m-%dT%H:%M:%SZ}"
            if begin > now:
                return f"{certificate} is not valid before {begin:%Y-%m-%dT%H:%M:%SZ}"
            if not tls.is_signed_as_trusted(self.directory):
                authorities = self.directory / keyfiles.AUTHORITIES
                return f"it seems not to accept {certificate}, which no authority in {authorities} has signed"
        return ""


_ABOUT_CERTIFICATES = ("certificate", "unknown ca", "access denied")
"""In the names of alerts, which a broker sends that is no Python program, or a proxy before it."""


def _alert(error: Exception) -> str:
    # Where the server says why, OpenSSL keeps it as TLSV1_ALERT_UNKNOWN_CA or the like.
    reason = getattr(error, "reason", "") or getattr(error.__cause__, "reason", "") or ""
    _, found, alert = str(reason).partition("_ALERT_")
    return f" ({alert.replace('_', ' ').lower()})" if found else ""


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or type(error).__name__
