"""Client configuration: API server, credentials and proxy, from a kubeconfig or from the pod's service
account.

Composition roots load a `KubeConfig` and open a `kube.client.Client` with it. It names secret files instead
of holding their contents, because these may be replaced while the client runs; `kube.auth` reads them.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kubelend.core.errors import InvalidSettings
from kubelend.kube import exec_plugins, held, kubeconfig, proxies
from kubelend.kube.exec_plugins import Plugin
from kubelend.kube.held import Held

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


class Origin(msgspec.Struct, frozen=True):
    """The kubeconfig and context that the configuration was read from."""

    path: str
    context: str


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """An API server and the credentials to access it."""

    server: str
    """URL of the API server. May end in a path prefix."""
    authorities: Held = held.NOTHING
    """Trusted certificate authorities. Defaults to those of the system."""
    certificate: Held = held.NOTHING
    key: Held = held.NOTHING
    token: Held = held.NOTHING
    plugin: Plugin | None = None
    impersonation: tuple[tuple[str, str], ...] = ()
    """Impersonation headers."""
    tls_server_name: str = ""
    """Server name in its certificate, if different from the URL's host."""
    insecure: bool = False
    """Whether to skip verification of the server's certificate."""
    namespace: str = "default"
    """Default namespace."""
    proxy: str = ""
    origin: Origin | None = None

    def __repr__(self) -> str:
        return f"KubeConfig({self.server!r}, {self.manner})"

    @property
    def manner(self) -> str:
        """How the client authenticates, without secrets."""
        if self.plugin:
            return f"by {self.plugin.command}"
        ways = [("certificate", self.certificate), ("token", self.token)]
        return " and ".join(f"by {name}" for name, way in ways if way) or "anonymously"


def find(
    kubeconfig_path: str = "", context: str = "", *, account: Path = SERVICE_ACCOUNT
) -> Access:
    """Load the configuration as kubectl does: the named kubeconfig, else $KUBECONFIG, else the pod's
    service account, else ~/.kube/config.
    """
    is_named = bool(kubeconfig_path or context or os.environ.get(kubeconfig.VARIABLE))
    if not is_named and os.environ.get(HOST):
        return in_cluster(account)
    return from_kubeconfig(kubeconfig_path, context)


def in_cluster(
    directory: Path = SERVICE_ACCOUNT, environment: Mapping[str, str] = os.environ
) -> Access:
    """Use the pod's service account. The kubelet replaces its token about every hour."""
    host, port = environment.get(HOST, ""), environment.get(PORT, "443")
    if not host:
        raise InvalidSettings(f"not running in a pod: {HOST} is not set", hint="use --kubeconfig")
    token, authorities = Held(path=directory / "token"), Held(path=directory / "ca.crt")
    for file in (token, authorities):
        file.read(hint="check that the pod does not set automountServiceAccountToken: false")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    namespace = directory / "namespace"
    return Access(
        server=server,
        authorities=authorities,
        token=token,
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
        proxy=proxies.for_server(server, environment),
    )


def from_kubeconfig(path: str | Path | None = None, context: str = "") -> Access:
    """Load one context of a kubeconfig; without a path of $KUBECONFIG, or of ~/.kube/config."""
    paths = kubeconfig.files(str(path or ""))
    choice = kubeconfig.choose(paths, context)
    cluster, user = choice.cluster, choice.user
    authorities = _held(
        cluster.certificate_authority_data, cluster.certificate_authority, choice.cluster_file
    )
    _check_cluster(cluster, choice, authorities)
    _check_user(user, choice)
    return Access(
        server=cluster.server.rstrip("/"),
        authorities=authorities,
        certificate=_held(user.client_certificate_data, user.client_certificate, choice.user_file),
        key=_held(user.client_key_data, user.client_key, choice.user_file),
        token=_token(user, choice.user_file),
        plugin=_plugin(user.exec, choice, authorities),
        impersonation=_impersonation(user),
        tls_server_name=cluster.tls_server_name,
        insecure=cluster.insecure_skip_tls_verify,
        namespace=choice.namespace or "default",
        proxy=cluster.proxy_url or proxies.for_server(cluster.server),
        origin=Origin(str(path or ""), choice.name),
    )


def files(access: Access) -> list[Path | None]:
    """Return the files that the configuration depends on, for change detection."""
    own = [access.authorities.path, access.certificate.path, access.key.path, access.token.path]
    return own if access.origin is None else [*own, *kubeconfig.files(access.origin.path)]


def _held(data: bytes, path: str, beside: Path) -> Held:
    if data or not path:
        return Held(data)
    return Held(path=beside.absolute().parent / path)


def _token(user: kubeconfig.User, file: Path) -> Held:
    return _held(b"" if user.token_file else user.token.encode(), user.token_file, file)


def _check_cluster(
    cluster: kubeconfig.Cluster, choice: kubeconfig.Choice, authorities: Held
) -> None:
    what = f"{choice.cluster_file}, context {choice.name!r}"
    url = urlsplit(cluster.server)
    if url.scheme not in ("https", "http") or not url.hostname:
        raise InvalidSettings(f"{what}: server is not a URL", hint="use https://host:port")
    if cluster.insecure_skip_tls_verify and authorities:
        raise InvalidSettings(
            f"{what}: insecure-skip-tls-verify and certificate-authority are both set",
            hint="remove one of the two",
        )
    if urlsplit(cluster.proxy_url).scheme not in ("", "http", "https"):
        raise InvalidSettings(
            f"{what}: proxy-url must have scheme http or https", hint="use such a proxy"
        )
    authorities.read(hint="correct certificate-authority")


def _check_user(user: kubeconfig.User, choice: kubeconfig.Choice) -> None:
    what = f"{choice.user_file}, context {choice.name!r}"
    if user.auth_provider is not None:
        raise InvalidSettings(
            f"{what}: auth-provider is not supported, as in Kubernetes since 1.26",
            hint="use the provider's exec plugin",
        )
    if user.username:
        raise InvalidSettings(
            f"{what}: user names and passwords are not supported, as in Kubernetes since 1.19",
            hint="use a certificate or a token",
        )
    pair = (
        bool(user.client_certificate or user.client_certificate_data),
        bool(user.client_key or user.client_key_data),
    )
    if pair in ((True, False), (False, True)):
        raise InvalidSettings(
            f"{what}: client certificate and key must both be set", hint="add the missing one"
        )


def _plugin(
    found: kubeconfig.Exec | None, choice: kubeconfig.Choice, authorities: Held
) -> Plugin | None:
    if found is None:
        return None
    what = f"{choice.user_file}, context {choice.name!r}: exec"
    if found.api_version not in exec_plugins.VERSIONS:
        raise InvalidSettings(
            f"{what}: apiVersion {found.api_version!r} is not supported",
            hint=f"use {exec_plugins.VERSIONS[0]}, and a newer plugin",
        )
    if found.interactive_mode == "Always":
        raise InvalidSettings(
            f"{what}: interactiveMode Always is not supported without a terminal",
            hint="set it to Never",
        )
    command = found.command
    if os.sep in command:
        command = str(choice.user_file.absolute().parent / command)
    return Plugin(
        command=command,
        api_version=found.api_version,
        arguments=found.args or (),
        variables={one.name: one.value for one in found.env or ()},
        cluster=_told(choice.cluster, authorities) if found.provide_cluster_info else None,
        hint=" ".join(found.install_hint.split()),
    )


def _told(cluster: kubeconfig.Cluster, authorities: Held) -> dict[str, Any]:
    """Cluster information for an exec plugin, with the field names of a kubeconfig."""
    info: dict[str, Any] = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": base64.b64encode(authorities.read()).decode(),
        "proxy-url": cluster.proxy_url,
    }
    info["config"] = next(
        (
            one.extension
            for one in cluster.extensions or ()
            if one.name == f"{exec_plugins.GROUP}/exec"
        ),
        None,
    )
    return {name: value for name, value in info.items() if value}


def _impersonation(user: kubeconfig.User) -> tuple[tuple[str, str], ...]:
    headers = [("Impersonate-User", user.as_), ("Impersonate-Uid", user.as_uid)]
    headers += [("Impersonate-Group", group) for group in user.as_groups or ()]
    for name, values in (user.as_user_extra or {}).items():
        headers += [(f"Impersonate-Extra-{name}", value) for value in values]
    return tuple((name, value) for name, value in headers if value)
