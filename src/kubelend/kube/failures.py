"""Maps exceptions of the HTTP library to errors."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from datetime import timedelta

import aiohttp

from kubelend.core import durations
from kubelend.core.errors import Unavailable


@contextlib.contextmanager
def map_http_errors(server: str, timeout: timedelta) -> Iterator[None]:
    """Map exceptions of the HTTP library. All become retryable, because networks and certificates can be
    repaired.
    """
    try:
        yield
    except TimeoutError as error:
        raise Unavailable(
            f"API server at {server} did not answer within {durations.format_duration_short(timeout)}",
            hint="check its load and the network",
        ) from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise _untrusted_certificate(server, error.certificate_error) from error
    except aiohttp.ClientConnectorError as error:
        raise Unavailable(
            f"cannot connect to the API server at {server}: {_os_error_reason(error.os_error)}",
            hint="check that it runs, and its address",
        ) from error
    except aiohttp.ClientConnectionError as error:
        raise Unavailable(
            f"API server at {server} closed the connection", hint="wait, in case it restarts"
        ) from error
    except aiohttp.ClientError as error:
        # Without the exception's message, which may contain headers and thereby a token.
        raise Unavailable(
            f"invalid response from the API server at {server} ({type(error).__name__})",
            hint="check the address and the proxy",
        ) from error


def _untrusted_certificate(server: str, error: Exception) -> Unavailable:
    text = getattr(error, "verify_message", "") or type(error).__name__
    return Unavailable(
        f"certificate of the API server at {server} is not trusted: {text}",
        hint="check the kubeconfig's certificate-authority and tls-server-name",
    )


def _os_error_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or type(error).__name__
