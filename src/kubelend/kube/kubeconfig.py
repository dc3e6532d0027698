"""Kubeconfig files: format and merging, as in kubectl.

Of several entries with one name the first wins, and so does the first `current-context`. Paths in a file
are relative to that file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from kubelend.core.errors import InvalidSettings

KUBECONFIG_VARIABLE: Final = "KUBECONFIG"


class Extension(msgspec.Struct):
    name: str = ""
    extension: Any = None


class Cluster(msgspec.Struct, frozen=True, rename="kebab"):
    """Address of an API server and how to verify it."""

    server: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority: str = ""
    certificate_authority_data: bytes = b""
    proxy_url: str = ""
    extensions: list[Extension] | None = None


class EnvVar(msgspec.Struct, frozen=True):
    name: str
    value: str = ""


class ExecConfig(msgspec.Struct, frozen=True, rename="camel"):
    """An exec credential plugin, see `kube.exec_plugins`."""

    command: str
    api_version: str = ""
    args: tuple[str, ...] | None = None
    env: tuple[EnvVar, ...] | None = None
    interactive_mode: str = ""
    provide_cluster_info: bool = False
    install_hint: str = ""


class User(msgspec.Struct, frozen=True, rename="kebab"):
    """Credentials of a user."""

    client_certificate: str = ""
    client_certificate_data: bytes = b""
    client_key: str = ""
    client_key_data: bytes = b""
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


class Context(msgspec.Struct, frozen=True):
    """A user at a cluster, with a default namespace."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


class SelectedContext(NamedTuple):
    """The selected context, with the files that its cluster and user come from."""

    name: str
    cluster: Cluster
    cluster_file: Path
    user: User
    user_file: Path
    namespace: str

    def __repr__(self) -> str:
        return f"SelectedContext({self.name!r})"


def kubeconfig_files(path: str = "", environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the kubeconfig files to use: the named one, else those of $KUBECONFIG, else ~/.kube/config."""
    if path:
        return [Path(path)]
    if listed := [
        Path(one) for one in environment.get(KUBECONFIG_VARIABLE, "").split(os.pathsep) if one
    ]:
        return listed
    return [Path.home() / ".kube" / "config"]


def select_context(paths: Sequence[Path], context: str = "") -> SelectedContext:
    """Return the context of this name, or the current one. Missing files are skipped unless all are
    missing.
    """
    found = [(path, _read_kubeconfig(path)) for path in paths if len(paths) == 1 or path.exists()]
    where = os.pathsep.join(map(str, paths))
    if not found:
        raise InvalidSettings(f"no kubeconfig found: none of {where} exists", hint=_HINT)
    name = context or next((each.current for _, each in found if each.current), "")
    if not name:
        raise InvalidSettings(
            f"{where} has no current-context",
            hint="use --context, or run `kubectl config use-context`",
        )
    _, chosen = _find_entry("context", name, where, [(p, c.contexts_by_name()) for p, c in found])
    cluster_file, cluster = _find_entry(
        "cluster", chosen.cluster, where, [(p, c.clusters_by_name()) for p, c in found]
    )
    user_file, user = paths[0], User()
    if chosen.user:
        user_file, user = _find_entry(
            "user", chosen.user, where, [(p, c.users_by_name()) for p, c in found]
        )
    return SelectedContext(name, cluster, cluster_file, user, user_file, chosen.namespace)


_HINT: Final = "use --kubeconfig, or set $KUBECONFIG"

Entry = TypeVar("Entry", Cluster, User, Context)


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: Cluster | None = None


class _NamedUser(msgspec.Struct):
    name: str
    user: User | None = None


class _NamedContext(msgspec.Struct):
    name: str
    context: Context | None = None


class _KubeconfigFile(msgspec.Struct, rename="kebab"):
    clusters: list[_NamedCluster] | None = None
    users: list[_NamedUser] | None = None
    contexts: list[_NamedContext] | None = None
    current_context: str | None = None

    @property
    def current(self) -> str:
        return self.current_context or ""

    def clusters_by_name(self) -> Iterator[tuple[str, Cluster]]:
        return ((one.name, one.cluster or Cluster()) for one in self.clusters or ())

    def users_by_name(self) -> Iterator[tuple[str, User]]:
        return ((one.name, one.user or User()) for one in self.users or ())

    def contexts_by_name(self) -> Iterator[tuple[str, Context]]:
        return ((one.name, one.context or Context()) for one in self.contexts or ())


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
    what: str, name: str, where: str, found: Sequence[tuple[Path, Iterator[tuple[str, Entry]]]]
) -> tuple[Path, Entry]:
    names = []
    for path, entries in found:
        for each, entry in entries:
            if each == name:
                return path, entry
            names.append(each)
    there = ", ".join(sorted(set(names))) or "none"
    raise InvalidSettings(f"{where} has no {what} {name!r}", hint=f"use one of: {there}")
