"""Who calls, as of now: tokens and certificates that change while a client runs.

`kube.connections` asks before each call, which costs a stat of each file. A file that is half-written or
gone for a moment leaves the last good answer as it is.
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
    """What a call is made with."""

    headers: tuple[tuple[str, str], ...]
    context: ssl.SSLContext | None
    given: Given
    access: Access

    def __repr__(self) -> str:
        return f"Shown({self.access!r})"


class Credentials:
    """Of one client."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._runner = exec_plugins.Runner(access.plugin) if access.plugin else None
        self._signature: held.Signature | None = None
        self._has_read = False
        self._files = (b"", Given())
        self._context: tuple[tuple[bytes, ...], ssl.SSLContext] | None = None

    async def current(self) -> Shown:
        """`InvalidSettings` if there is nothing to call with, and never was."""
        self._look()
        authorities, said = self._files
        given = said
        if self._runner is not None:
            said = await self._runner.given()
            given = _completed(said, given)
        headers = self._access.impersonation
        if given.token:
            headers = (("Authorization", f"Bearer {given.token}"), *headers)
        return Shown(headers, self._tls(authorities, given), said, self._access)

    def refuse(self, shown: Shown) -> None:
        """An API server did not believe it: look again, whatever the files' times say."""
        self._signature = None
        if self._runner is not None:
            self._runner.refuse(shown.given)

    def _look(self) -> None:
        # Before the files are read: a change in between is then seen by the next look.
        signature = held.signature(accesses.files(self._access))
        if signature == self._signature:
            return
        with contextlib.suppress(InvalidSettings) if self._has_read else contextlib.nullcontext():
            self._reread()
            self._files = _read(self._access)
            self._signature = signature
            self._has_read = True

    def _reread(self) -> None:
        """The kubeconfig may hold the secrets itself. It stays with its context, whichever is current now."""
        origin = self._access.origin
        if origin is None or not self._has_read:
            return
        found = accesses.from_kubeconfig(origin.path, origin.context)
        if found.plugin != self._access.plugin:
            self._runner = exec_plugins.Runner(found.plugin) if found.plugin else None
        self._access = found

    def _tls(self, authorities: bytes, given: Given) -> ssl.SSLContext | None:
        """The same one for the same bytes: a connection is used again only by calls of its context."""
        if self._access.server.startswith("http:"):
            return None
        parts = (authorities, given.certificate, given.key)
        if self._context is not None and self._context[0] == parts:
            return self._context[1]
        try:
            made = tls.context(*parts, insecure=self._access.insecure)
        except InvalidSettings:
            # A certificate whose key is still being written, most likely.
            if self._context is None:
                raise
            self._signature = None
            return self._context[1]
        self._context = (parts, made)
        return made


def _completed(from_plugin: Given, from_files: Given) -> Given:
    """A plugin may give a token beside a certificate of the kubeconfig's."""
    if from_plugin.certificate or not from_files.certificate:
        return from_plugin
    return from_plugin._replace(certificate=from_files.certificate, key=from_files.key)


def _read(access: Access) -> tuple[bytes, Given]:
    token = access.token.read().decode("utf-8", "replace").strip()
    if not token.isascii() or not (token.isprintable() or not token):
        raise InvalidSettings(
            f"the token of {access.server} is no token", hint="it is one line of plain characters"
        )
    given = Given(token, access.certificate.read(), access.key.read())
    return access.authorities.read(), given
