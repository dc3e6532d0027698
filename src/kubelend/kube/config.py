"""Client configuration: API server, credentials and proxy, from a kubeconfig or the pod's service account.

Composition roots load a `KubeConfig` and open a `kube.client.Client` with it. It names secret files instead
of holding their contents, because these may be replaced while the client runs; `kube.auth` reads them.

Kubeconfig files are merged as by kubectl: of several entries with one name the first wins, and so does the
first `current-context`. Paths in a file are relative to that file.
"""

from __future__ import annotations

import base64
import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files

FileFingerprint = tuple[tuple[int, ...] | None, ...]
"""Fingerprint of some files, which changes when one of them does."""


class DataOrFile(msgspec.Struct, frozen=True):
    """Inline data, or the path of a file. Its repr does not show the content."""

    data: bytes = b""
    """With a path: used while there is no such file."""
    path: Path | None = None

    def read(self, hint: str = "") -> bytes:
        """Return the current content; empty if nothing is configured. `InvalidSettings` names the file."""
        if self.path is None or (self.data and not self.path.exists()):
            return self.data
        return files.read_file(self.path, hint=hint)

    def __bool__(self) -> bool:
        return bool(self.data) or self.path is not None

    def __repr__(self) -> str:
        return (
            f"DataOrFile(path={str(self.path)!r})"
            if self.path
            else f"DataOrFile({len(self.data)} bytes)"
        )


NO_DATA = DataOrFile()


def fingerprint_files(paths: Iterable[Path | None]) -> FileFingerprint:
    """Return a fingerprint that is equal as long as none of the files has changed."""

    def fingerprint(path: Path | None) -> tuple[int, ...] | None:
        # Follows links, and so detects that Kubernetes replaced the ..data link of a mounted secret.
        try:
            found = path.stat() if path else None
        except OSError:
            return None
        return found and (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    return tuple(map(fingerprint, paths))


SERVICE_ACCOUNT_DIRECTORY: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
KUBECONFIG_VARIABLE: Final = "KUBECONFIG"


EXEC_GROUP: Final = "client.authentication.k8s.io"
EXEC_VERSIONS: Final = (f"{EXEC_GROUP}/v1", f"{EXEC_GROUP}/v1beta1")


class ExecPlugin(msgspec.Struct, frozen=True):
    """Configuration of a plugin. Arguments and variables may be secrets."""

    command: str
    api_version: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    cluster: dict[str, Any] | None = None
    """Cluster information, if the plugin asks for it."""
    hint: str = ""
    """The kubeconfig's installHint."""

    def __repr__(self) -> str:
        return f"Plugin({self.command!r})"


class KubeconfigSource(msgspec.Struct, frozen=True):
    """The kubeconfig and context that the configuration was read from."""

    path: str
    context: str


class KubeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An API server and the credentials to access it."""

    server: str
    """URL of the API server. May end in a path prefix."""
    authorities: DataOrFile = NO_DATA
    """Trusted certificate authorities. Defaults to those of the system."""
    certificate: DataOrFile = NO_DATA
    key: DataOrFile = NO_DATA
    token: DataOrFile = NO_DATA
    plugin: ExecPlugin | None = None
    impersonation: tuple[tuple[str, str], ...] = ()
    """Impersonation headers."""
    tls_server_name: str = ""
    """Server name in its certificate, if different from the URL's host."""
    insecure: bool = False
    """Whether to skip verification of the server's certificate."""
    namespace: str = "default"
    """Default namespace."""
    proxy: str = ""
    origin: KubeconfigSource | None = None

    def __repr__(self) -> str:
        return f"KubeConfig({self.server!r}, {self.auth_method})"

    @property
    def auth_method(self) -> str:
        """How the client authenticates, without secrets."""
        if self.plugin:
            return f"by {self.plugin.command}"
        ways = [("certificate", self.certificate), ("token", self.token)]
        return " and ".join(f"by {name}" for name, way in ways if way) or "anonymously"


def load_config(
    kubeconfig_path: str = "",
    context: str = "",
    *,
    service_account: Path = SERVICE_ACCOUNT_DIRECTORY,
) -> KubeConfig:
    """Load the configuration as kubectl does: the named kubeconfig, else $KUBECONFIG, else the pod's
    service account, else ~/.kube/config.
    """
    is_named = bool(kubeconfig_path or context or os.environ.get(KUBECONFIG_VARIABLE))
    if not is_named and os.environ.get(HOST_VARIABLE):
        return in_cluster_config(service_account)
    return config_from_kubeconfig(kubeconfig_path, context)


def in_cluster_config(
    directory: Path = SERVICE_ACCOUNT_DIRECTORY, environment: Mapping[str, str] = os.environ
) -> KubeConfig:
    """Use the pod's service account. The kubelet replaces its token about every hour."""
    host, port = environment.get(HOST_VARIABLE, ""), environment.get(PORT_VARIABLE, "443")
    if not host:
        raise InvalidSettings(
            f"not running in a pod: {HOST_VARIABLE} is not set", hint="use --kubeconfig"
        )
    token, authorities = DataOrFile(path=directory / "token"), DataOrFile(path=directory / "ca.crt")
    for file in (token, authorities):
        file.read(hint="check that the pod does not set automountServiceAccountToken: false")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    namespace = directory / "namespace"
    return KubeConfig(
        server=server,
        authorities=authorities,
        token=token,
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
        proxy=proxy_for(server, environment),
    )


def config_from_kubeconfig(path: str | Path | None = None, context: str = "") -> KubeConfig:
    """Load one context of a kubeconfig; without a path of $KUBECONFIG, or of ~/.kube/config."""
    paths = kubeconfig_files(str(path or ""))
    choice = select_context(paths, context)
    cluster, user = choice.cluster, choice.user
    authorities = _data_or_file(
        cluster.certificate_authority_data, cluster.certificate_authority, choice.cluster_file
    )
    _check_cluster(cluster, choice, authorities)
    if cluster.server.startswith("http:"):
        user = KubeUser()  # as kubectl: no credentials without TLS
    _check_user(user, choice)
    return KubeConfig(
        server=cluster.server.rstrip("/"),
        authorities=authorities,
        certificate=_data_or_file(
            user.client_certificate_data, user.client_certificate, choice.user_file
        ),
        key=_data_or_file(user.client_key_data, user.client_key, choice.user_file),
        token=DataOrFile(user.token.encode(), _relative_path(user.token_file, choice.user_file)),
        plugin=_exec_plugin(user.exec, choice, authorities),
        impersonation=_impersonation(user),
        tls_server_name=cluster.tls_server_name,
        insecure=cluster.insecure_skip_tls_verify,
        namespace=choice.namespace or "default",
        proxy=cluster.proxy_url or proxy_for(cluster.server),
        origin=KubeconfigSource(str(path or ""), choice.name),
    )


def config_files(config: KubeConfig) -> list[Path | None]:
    """Return the files that the configuration depends on, for change detection."""
    own = [config.authorities.path, config.certificate.path, config.key.path, config.token.path]
    return own if config.origin is None else [*own, *kubeconfig_files(config.origin.path)]


# -- kubeconfig files


class Extension(msgspec.Struct):
    name: str = ""
    extension: Any = None


class KubeCluster(msgspec.Struct, frozen=True, rename="kebab"):
    """Address of an API server and how to verify it."""

    server: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    proxy_url: str = ""
    extensions: list[Extension] | None = None


class EnvVar(msgspec.Struct, frozen=True):
    name: str
    value: str = ""


class ExecConfig(msgspec.Struct, frozen=True, rename="camel"):
    """An exec credential plugin, run by `kube.auth`."""

    command: str
    api_version: str = ""
    args: tuple[str, ...] | None = None
    env: tuple[EnvVar, ...] | None = None
    interactive_mode: str = ""
    provide_cluster_info: bool = False
    install_hint: str = ""


class KubeUser(msgspec.Struct, frozen=True, rename="kebab"):
    """Credentials of a user."""

    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    username: str = ""
    exec: ExecConfig | None = None
    auth_provider: Any = None
    as_: str = msgspec.field(default="", name="as")
    as_uid: str = ""
    as_groups: tuple[str, ...] | None = None
    as_user_extra: dict[str, tuple[str, ...]] | None = None

    def __repr__(self) -> str:
        return "User(...)"


class KubeContext(msgspec.Struct, frozen=True):
    """A user at a cluster, with a default namespace."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


class SelectedContext(NamedTuple):
    """The selected context, with the files that its cluster and user come from."""

    name: str
    cluster: KubeCluster
    cluster_file: Path
    user: KubeUser
    user_file: Path
    namespace: str

    def __repr__(self) -> str:
        return f"SelectedContext({self.name!r})"


def kubeconfig_files(path: str = "", environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the kubeconfig files to use: the named one, else those of $KUBECONFIG, else ~/.kube/config."""
    if path:
        return [Path(path)]
    listed = environment.get(KUBECONFIG_VARIABLE, "").split(os.pathsep)
    return [Path(one) for one in listed if one] or [Path.home() / ".kube" / "config"]


def select_context(paths: Sequence[Path], context: str = "") -> SelectedContext:
    """Return the context of this name, or the current one. Missing files are skipped unless all are."""
    found = [(path, _read_kubeconfig(path)) for path in paths if len(paths) == 1 or path.exists()]
    where = os.pathsep.join(map(str, paths))
    if not found:
        raise InvalidSettings(f"no kubeconfig found: none of {where} exists", hint=_HINT)
    name = context or next((each.current_context for _, each in found if each.current_context), "")
    if not name:
        raise InvalidSettings(
            f"{where} has no current-context",
            hint="name a context, or run `kubectl config use-context`",
        )
    _, chosen = _find_entry("context", name, where, found)
    cluster_file, cluster = _find_entry("cluster", chosen.cluster, where, found)
    user_file, user = paths[0], KubeUser()
    if chosen.user:
        user_file, user = _find_entry("user", chosen.user, where, found)
    return SelectedContext(name, cluster, cluster_file, user, user_file, chosen.namespace)


_HINT: Final = "use --kubeconfig, or set $KUBECONFIG"


class _Entry(msgspec.Struct):
    """A named entry of one of the three lists."""

    name: str
    cluster: KubeCluster | None = None
    user: KubeUser | None = None
    context: KubeContext | None = None


class _KubeconfigFile(msgspec.Struct, rename="kebab"):
    clusters: list[_Entry] | None = None
    users: list[_Entry] | None = None
    contexts: list[_Entry] | None = None
    current_context: str | None = None


def _read_kubeconfig(path: Path) -> _KubeconfigFile:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InvalidSettings(f"kubeconfig {path} is missing", hint=_HINT) from None
    except OSError as error:
        raise InvalidSettings(
            f"kubeconfig {path} cannot be read: {error.strerror}", hint="check its owner and mode"
        ) from error
    try:
        return msgspec.yaml.decode(content, type=_KubeconfigFile | None) or _KubeconfigFile()
    except msgspec.ValidationError as problem:
        raise InvalidSettings(f"kubeconfig {path}: {problem}", hint="correct it") from None
    except msgspec.DecodeError as problem:
        # Only the line number, because the parser's message quotes the content, which may be a secret.
        mark = getattr(problem.__context__, "problem_mark", None)
        position = f" (line {mark.line + 1})" if mark else ""
        raise InvalidSettings(
            f"kubeconfig {path} is not valid YAML{position}", hint="correct it"
        ) from None


def _find_entry(
    what: str, name: str, where: str, found: Sequence[tuple[Path, _KubeconfigFile]]
) -> tuple[Path, Any]:
    """The entry and its file: the first one wins, as in kubectl."""
    empty = {"context": KubeContext, "cluster": KubeCluster, "user": KubeUser}[what]
    names = []
    for path, file in found:
        for entry in getattr(file, f"{what}s") or ():
            if entry.name == name:
                return path, getattr(entry, what) or empty()
            names.append(entry.name)
    there = ", ".join(sorted(set(names))) or "none"
    raise InvalidSettings(f"{where} has no {what} {name!r}", hint=f"use one of: {there}")


def _data_or_file(encoded: str, path: str, file: Path) -> DataOrFile:
    """`encoded` is base64, which may have line breaks; `path` is relative to the kubeconfig."""
    if not encoded:
        return DataOrFile(path=_relative_path(path, file))
    try:
        return DataOrFile(base64.b64decode("".join(encoded.split()), validate=True))
    except ValueError:
        raise InvalidSettings(
            f"{file}: invalid base64 in a -data field", hint="correct it"
        ) from None


def _relative_path(path: str, file: Path) -> Path | None:
    return file.absolute().parent / path if path else None


def _check_cluster(cluster: KubeCluster, choice: SelectedContext, authorities: DataOrFile) -> None:
    what = f"{choice.cluster_file}, context {choice.name!r}"
    if not _is_http_url(cluster.server):
        raise InvalidSettings(f"{what}: server is not a URL", hint="use https://host:port")
    if cluster.insecure_skip_tls_verify and authorities:
        raise InvalidSettings(
            f"{what}: insecure-skip-tls-verify and certificate-authority are both set",
            hint="remove one of the two",
        )
    if cluster.proxy_url and not _is_http_url(cluster.proxy_url):
        raise InvalidSettings(
            f"{what}: proxy-url must be a URL with scheme http or https", hint="correct proxy-url"
        )
    authorities.read(hint="correct certificate-authority")


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    return url.scheme in ("https", "http") and bool(url.hostname)


def _check_user(user: KubeUser, choice: SelectedContext) -> None:
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
    has_certificate = user.client_certificate or user.client_certificate_data
    if bool(has_certificate) != bool(user.client_key or user.client_key_data):
        raise InvalidSettings(
            f"{what}: client certificate and key must both be set", hint="add the missing one"
        )


def _exec_plugin(
    found: ExecConfig | None, choice: SelectedContext, authorities: DataOrFile
) -> ExecPlugin | None:
    if found is None:
        return None
    what = f"{choice.user_file}, context {choice.name!r}: exec"
    if found.api_version not in EXEC_VERSIONS:
        raise InvalidSettings(
            f"{what}: apiVersion {found.api_version!r} is not supported",
            hint=f"use {EXEC_VERSIONS[0]}, and a newer plugin",
        )
    if found.interactive_mode == "Always":
        raise InvalidSettings(
            f"{what}: interactiveMode Always is not supported without a terminal",
            hint="set it to Never",
        )
    command = found.command
    if os.sep in command:
        command = str(choice.user_file.absolute().parent / command)
    return ExecPlugin(
        command=command,
        api_version=found.api_version,
        arguments=found.args or (),
        variables={one.name: one.value for one in found.env or ()},
        cluster=_cluster_info(choice.cluster, authorities) if found.provide_cluster_info else None,
        hint=" ".join(found.install_hint.split()),
    )


def _cluster_info(cluster: KubeCluster, authorities: DataOrFile) -> dict[str, Any]:
    """Cluster information for an exec plugin, with the field names of a kubeconfig."""
    extensions = {one.name: one.extension for one in reversed(cluster.extensions or ())}
    info: dict[str, Any] = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": base64.b64encode(authorities.read()).decode(),
        "proxy-url": cluster.proxy_url,
        "config": extensions.get(f"{EXEC_GROUP}/exec"),
    }
    return {name: value for name, value in info.items() if value}


def _impersonation(user: KubeUser) -> tuple[tuple[str, str], ...]:
    headers = [("Impersonate-User", user.as_), ("Impersonate-Uid", user.as_uid)]
    headers += [("Impersonate-Group", group) for group in user.as_groups or ()]
    for name, values in (user.as_user_extra or {}).items():
        headers += [(f"Impersonate-Extra-{name}", value) for value in values]
    return tuple((name, value) for name, value in headers if value)


def proxy_for(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the proxy URL for a server; empty if there is none."""

    def variable(name: str) -> str:
        return environment.get(name.upper()) or environment.get(name) or ""

    parts = urlsplit(url)
    host, proxy = parts.hostname or "", variable(f"{parts.scheme}_proxy")
    rules = [rule.strip().lower() for rule in variable("no_proxy").split(",")]
    is_excluded = any(_no_proxy_matches(rule, host) for rule in rules if rule)
    if not proxy or is_excluded or host == "localhost" or _is_loopback(host):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_proxy_matches(rule: str, host: str) -> bool:
    if rule == "*":
        return True
    if "/" in rule:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(rule, strict=False)
        except ValueError:
            return False
    name = rule.removeprefix("*").removeprefix(".")
    return host.endswith(f".{name}") or (host == name and not rule.startswith("."))
