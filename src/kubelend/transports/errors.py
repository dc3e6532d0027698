"""Maps exceptions of the HTTP client to errors of Kubelend, with a likely cause and a hint.

With TLS 1.3 a server verifies the client certificate after the client's handshake has finished, and rejects
it by closing the connection (or with an alert) at the first read. The client sees a connection that ends
before the first response; the likely cause is taken from the alert, or from the client's own files. If
neither is known, the broker may be restarting.
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
    UnexpectedResponse,
)
from kubelend.kits import files
from kubelend.transports import tls


class BrokerEndpoint:
    """The URL of a broker, and the directory with the certificates to call it."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.has_answered = False
        """After the first response the client certificate is known to be accepted."""

    def reset(self) -> None:
        """Resets `has_answered` after the certificate was reloaded."""
        self.has_answered = False

    @contextlib.contextmanager
    def translate_errors(self, timeout: timedelta) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise BrokerUnreachable(
                f"the broker at {self.url} did not answer within {durations.format_duration_short(timeout)}",
                hint="try again, or raise the timeout",
            ) from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._untrusted_error(error.certificate_error) from error
        except aiohttp.ClientSSLError as error:
            raise self._handshake_error(error.os_error) from error
        except aiohttp.ClientConnectorError as error:
            raise self._connect_error(error) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise self._disconnect_error(error) from error
        except aiohttp.ClientError as error:
            raise UnexpectedResponse(
                f"{self.url}: not a response of a broker: {error}",
                hint="check address and port",
            ) from error

    def _untrusted_error(self, error: Exception) -> BrokerUnreachable:
        text = getattr(error, "verify_message", "") or str(error)
        if "mismatch" in text or "not valid for" in text:
            return BrokerUnreachable(
                f"the certificate of {self.url} is not valid for that name",
                hint="use a name or address in the broker's certificate (`kubelend ca issue --dns/--ip`)",
            )
        return self._verification_error(text)

    def _verification_error(self, text: str) -> BrokerUnreachable:
        if "expired" in text or "not yet valid" in text:
            return BrokerUnreachable(
                f"the certificate of {self.url} is not valid now: {text}",
                hint="renew the certificate, and check the clocks of both sides",
            )
        return BrokerUnreachable(
            f"the certificate of {self.url} is not signed by a CA in"
            f" {self.directory / files.CA_CERTIFICATES}",
            hint="copy the ca.crt of this broker there, or check the address",
        )

    def _handshake_error(self, error: OSError) -> BrokerUnreachable:
        if _tls_alert(error):
            return self._disconnect_error(error)
        return BrokerUnreachable(
            f"TLS handshake with {self.url} failed: {_error_reason(error)}",
            hint="check address and port",
        )

    def _connect_error(self, error: aiohttp.ClientConnectorError) -> BrokerUnreachable:
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return BrokerUnreachable(
                f"cannot resolve the host name in {self.url}", hint="check the broker's address"
            )
        # With TLS 1.2 a broker rejects the client certificate by closing during the handshake.
        if isinstance(error.os_error, ConnectionResetError):
            return self._disconnect_error(error)
        if isinstance(error.os_error, ConnectionRefusedError):
            return BrokerUnreachable(
                f"connection refused by {self.url}",
                hint="start the broker, or give its address with --broker-url",
            )
        return BrokerUnreachable(
            f"cannot connect to {self.url}: {_error_reason(error.os_error)}",
            hint="check the broker's address and the network",
        )

    def _disconnect_error(self, error: Exception) -> BrokerUnreachable:
        if self.has_answered:
            # If the certificate expired since, the next connection ends like this too, and is examined.
            self.has_answered = False
            return BrokerUnreachable(
                f"the broker at {self.url} closed the connection",
                hint="the broker may be restarting; try again",
            )
        alert, fault = _tls_alert(error), self._own_certificate_problem()
        is_refused = fault or any(known in alert for known in _CERTIFICATE_ALERTS)
        kind = CertificateRefused if is_refused else BrokerUnreachable
        return kind(
            f"the broker at {self.url} closed the connection before its first response{alert}:"
            f" {fault or f'it may not accept {self.directory / files.TLS_CERTIFICATE}'}",
            hint="get a certificate from the CA of this broker (`kubelend ca issue`, or `kubelend join`)",
        )

    def _own_certificate_problem(self) -> str:
        """Checks validity period, issuer and extended key usage of the own certificate."""
        certificate = self.directory / files.TLS_CERTIFICATE
        now = datetime.now(UTC)
        with contextlib.suppress(InvalidSettings):
            own = tls.own_certificate(self.directory)
            begin, end = own.not_valid_before_utc, own.not_valid_after_utc
            if end <= now:
                return f"{certificate} expired at {end:%Y-%m-%dT%H:%M:%SZ}"
            if begin > now:
                return f"{certificate} is not valid before {begin:%Y-%m-%dT%H:%M:%SZ}"
            if not tls.is_own_ca_trusted(self.directory):
                authorities = self.directory / files.CA_CERTIFICATES
                return f"it may not accept {certificate}, which no CA in {authorities} has signed"
            if not tls.is_for_clients(own):
                return f"{certificate} is not for clients: its extended key usage lacks clientAuth"
        return ""


_CERTIFICATE_ALERTS = ("certificate", "unknown ca", "access denied")
"""Parts of names of TLS alerts about certificates, as sent by proxies."""


def _tls_alert(error: Exception) -> str:
    # OpenSSL reports an alert of the server as, for example, TLSV1_ALERT_UNKNOWN_CA.
    reason = getattr(error, "reason", "") or getattr(error.__cause__, "reason", "") or ""
    _, found, alert = str(reason).partition("_ALERT_")
    return f" ({alert.replace('_', ' ').lower()})" if found else ""


def _error_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or type(error).__name__
