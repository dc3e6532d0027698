"""Current credentials and TLS contexts of a client.

Files are checked for changes before each request, which costs one stat per file. If a file is incomplete or
missing for a moment, the last valid credentials stay in use.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import NamedTuple

from kubelend.core.errors import InvalidSettings
from kubelend.kube import access as accesses
from kubelend.kube import exec_plugins, held, tls
from kubelend.kube.access import Access
from kubelend.kube.exec_plugins import Given


class Shown(NamedTuple):
    """Credentials of one request."""

    headers: tuple[tuple[str, str], ...]
    context: ssl.SSLContext | None
    given: Given
    access: Access

    def __repr__(self) -> str:
        return f"RequestCredentials({self.access!r})"


class Credentials:
    """Loads and caches the credentials of one client."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._runner = exec_plugins.Runner(access.plugin) if access.plugin else None
        self._signature: held.Signature | None = None
        self._has_read = False
        self._files = (b"", Given())
        self._context: tuple[tuple[bytes, ...], ssl.SSLContext] | None = None

    async def current(self) -> Shown:
        """Return the current credentials. `InvalidSettings` if there have never been valid ones."""
        self._look()
        authorities, obtained = self._files
        given = obtained
        if self._runner is not None:
            obtained = await self._runner.given()
            given = _completed(obtained, given)
        headers = self._access.impersonation
        if given.token:
            headers = (("Authorization", f"Bearer {given.token}"), *headers)
        return Shown(headers, self._tls(authorities, given), obtained, self._access)

    def refuse(self, shown: Shown) -> None:
        """Drop credentials that an API server rejected, and read the files again even if they look
        unchanged.
        """
        self._signature = None
        if self._runner is not None:
            self._runner.refuse(shown.given)

    def _look(self) -> None:
        # Before the files are read, so that a change in between is detected by the next check.
        signature = held.signature(accesses.files(self._access))
        if signature == self._signature:
            return
        with contextlib.suppress(InvalidSettings) if self._has_read else contextlib.nullcontext():
            self._reread()
            self._files = _read(self._access)
            self._signature = signature
            self._has_read = True

    def _reread(self) -> None:
        """Reload the kubeconfig, which may contain inline secrets. The context stays, even if
        current-context has changed.
        """
        origin = self._access.origin
        if origin is None or not self._has_read:
            return
        found = accesses.from_kubeconfig(origin.path, origin.context)
        if found.plugin != self._access.plugin:
            self._runner = exec_plugins.Runner(found.plugin) if found.plugin else None
        self._access = found

    def _tls(self, authorities: bytes, given: Given) -> ssl.SSLContext | None:
        """Return the same context for the same bytes, because connections are pooled by context."""
        if self._access.server.startswith("http:"):
            return None
        parts = (authorities, given.certificate, given.key)
        if self._context is not None and self._context[0] == parts:
            return self._context[1]
        try:
            made = tls.context(*parts, insecure=self._access.insecure)
        except InvalidSettings:
            # Probably the key of a new certificate is still being written.
            if self._context is None:
                raise
            self._signature = None
            return self._context[1]
        self._context = (parts, made)
        return made


def _completed(from_plugin: Given, from_files: Given) -> Given:
    """Complete a plugin's token with the client certificate of the kubeconfig."""
    if from_plugin.certificate or not from_files.certificate:
        return from_plugin
    return from_plugin._replace(certificate=from_files.certificate, key=from_files.key)


def _read(access: Access) -> tuple[bytes, Given]:
    token = access.token.read().decode("utf-8", "replace").strip()
    if not token.isascii() or not (token.isprintable() or not token):
        raise InvalidSettings(
            f"invalid token for {access.server}", hint="use a token of one line of printable ASCII"
        )
    given = Given(token, access.certificate.read(), access.key.read())
    return access.authorities.read(), given
