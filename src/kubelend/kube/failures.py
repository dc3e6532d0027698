"""What a failed call to an API server means, in words: exceptions of the HTTP library become ours here."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from datetime import timedelta

import aiohttp

from kubelend.core import durations
from kubelend.core.errors import Unavailable


@contextlib.contextmanager
def translated(server: str, within: timedelta) -> Iterator[None]:
    """Around each use of the HTTP library. All of them may pass: networks and certificates are mended."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable(
            f"the API server at {server} did not answer within {durations.short(within)}",
            hint="is it overloaded, or cut off?",
        ) from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise _distrusted(server, error.certificate_error) from error
    except aiohttp.ClientConnectorError as error:
        raise Unavailable(
            f"no connection to the API server at {server}: {_reason(error.os_error)}",
            hint="check that it runs, and the address",
        ) from error
    except aiohttp.ClientConnectionError as error:
        raise Unavailable(
            f"the API server at {server} closed the connection", hint="it may be restarting"
        ) from error
    except aiohttp.ClientError as error:
        # Not its words: they may have headers in them, and so a token.
        raise Unavailable(
            f"{server} does not answer as an API server does ({type(error).__name__})",
            hint="check the address, and a proxy on the way",
        ) from error


def _distrusted(server: str, error: Exception) -> Unavailable:
    text = getattr(error, "verify_message", "") or type(error).__name__
    return Unavailable(
        f"the certificate of the API server at {server} is not believed: {text}",
        hint="check the kubeconfig's certificate-authority and tls-server-name",
    )


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or type(error).__name__
