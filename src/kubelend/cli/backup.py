"""`kubelend backup`, `restore`, `migrate-back` and `migrate-store`: the store of a broker as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from kubelend.cli import options, output
from kubelend.cli.audit import DEFAULT_STORE
from kubelend.cli.options import flag
from kubelend.core.errors import InvalidSettings
from kubelend.kits import tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kubelend.stores.backup import Manifest

Store = Annotated[
    str,
    flag(
        "Store of the broker: a file path, sqlite:///PATH or kubernetes:", envvar="KUBELEND_STORE"
    ),
]
GrantKey = Annotated[
    str,
    flag(
        "File with the keys that sign grants. Defaults to the one next to the store.",
        "PATH",
        envvar="KUBELEND_GRANT_KEY",
    ),
]
AuthorityPath = Annotated[
    Path | None,
    flag("Directory of the broker's CA (--ca-path), if it is part of the backup.", "PATH"),
]

_GRANT_KEY_MEMBER: Final = "grants.key"
_AUTHORITY_FILES: Final = ("ca.crt", "ca.key", "cross.crt", "dropped.crt")


def create_backup(
    file: Annotated[Path, options.argument("FILE")],
    store: Store = DEFAULT_STORE,
    grant_key: GrantKey = "",
    ca_path: AuthorityPath = None,
) -> None:
    """Back up the store of a broker and its keys into FILE, also while the broker runs.

    The copy is consistent and audited. FILE contains private keys, and only its owner can read it.
    """
    from kubelend.stores import backup

    places = _key_places(store, grant_key, ca_path)
    keys = {name: place for name, place in places.items() if place.exists()}
    if grant_key and _GRANT_KEY_MEMBER not in keys:
        raise InvalidSettings(f"--grant-key: {grant_key} does not exist", hint="check the path")
    if ca_path is not None and "ca.key" not in keys:
        raise InvalidSettings(f"--ca-path: {ca_path} has no ca.key", hint="check the path")
    print(_summary(file, backup.create(store, file, keys, output.now())))


def restore_backup(
    file: Annotated[Path, options.argument("FILE")],
    store: Store = DEFAULT_STORE,
    grant_key: GrantKey = "",
    ca_path: AuthorityPath = None,
    yes: options.Yes = False,
    dry_run: options.DryRun = False,
) -> None:
    """Restore the store of a stopped broker, and its keys, from a backup.

    Files in the way are kept under another name; a Kubernetes store has to be empty. Changes since the
    backup are lost: providers give back what the broker no longer knows.
    """
    from kubelend.stores import backup, factory

    if dry_run:
        print(_summary(file, backup.verify(file)))
        return
    path = factory.file_path(store)
    if path is not None and path.exists() and not yes:
        output.confirm(lambda: f"{path} will be replaced.", "Restore?")
    moved = backup.restore(file, store, _key_places(store, grant_key, ca_path), output.now)
    print(f"{store}: restored")
    for each in moved:
        output.note(tables.sanitize_line(f"kept {each}"))


def migrate_back(
    store: Annotated[str, flag("Kubernetes store of the broker.", envvar="KUBELEND_STORE")],
    yes: options.Yes = False,
) -> None:
    """Leave the objects of a Kubernetes store to the published Go broker, once all brokers are stopped.

    Reservations stay as they are. Audit log, members, tokens, quotas and policies are deleted. If it is
    interrupted, run it again.
    """
    from kubelend.stores import factory

    if not yes:
        output.confirm(lambda: "The audit log and all members will be deleted.", "Migrate back?")
    live = factory.leave_to_go_broker(store, output.now)
    print(f"left to the Go broker, live reservations: {live}")


def _summary(file: Path, found: Manifest) -> str:
    made = tables.format_time(found.created_at, output.now())
    return (
        f"{file}: backup of {made}, revision {found.revision},"
        f" live reservations: {found.reservations}, files: {', '.join(found.digests)}"
    )


def migrate_store(
    source: Annotated[str, options.argument("SOURCE")],
    target: Annotated[str, options.argument("TARGET")],
) -> None:
    """Copy the store of a stopped broker into an empty one of another kind, with its audit log.

    Each is a file path, or kubernetes:///kubeconfig?context=...&namespace=... The target has all of it or
    nothing; the source stays as it is. Both are audited and compared.

    For example: kubelend migrate-store broker.db 'kubernetes:?namespace=kubelend'
    """
    from kubelend.stores import backup

    found = backup.migrate(source, target, output.now)
    records = found.records
    print(
        tables.sanitize_line(
            f"{target}: copied {len(records.clusters)} clusters, {len(records.reservations)} reservations"
            f" and {len(found.archive)} archived ones, {len(records.members)} members,"
            f" {len(records.tokens)} tokens, {len(records.limits)} limits and"
            f" {len(found.log.lines)} entries of the audit log, revision {records.revision}"
        )
    )


def _key_places(store: str, grant_key: str, ca_path: Path | None) -> Mapping[str, Path]:
    from kubelend.stores import factory

    path = Path(grant_key) if grant_key else factory.path_beside(store, _GRANT_KEY_MEMBER)
    places = {} if path is None else {_GRANT_KEY_MEMBER: path}
    if ca_path is not None:
        places |= {name: ca_path / name for name in _AUTHORITY_FILES}
    return places
