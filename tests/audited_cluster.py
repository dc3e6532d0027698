"""A cluster of the lab whose API server notes every call: who did what, and whether it was allowed.

The roles that we ship are held against these notes: nothing that is needed is missing, and nothing is granted
that nobody uses. It is cheaper than taking one right after the other away, and says more.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kubelend.envtest.servers import ApiServers, LocalCluster

Json = dict[str, Any]

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}],
}


class Right(NamedTuple):
    """To do something to a kind of objects. `namespace` is empty for all of them."""

    namespace: str
    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        where = self.namespace or "all namespaces"
        return f"{self.verb} {self.resource}.{self.group} in {where}"


class Audited(LocalCluster):
    """Started as others are; `rights_used` tells what was done since."""

    def _command(self) -> list[str]:
        policy = self.directory / "audit-policy.json"
        policy.write_text(json.dumps(POLICY))
        return [
            *super()._command(),
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self._notes}",
            "--audit-log-mode=blocking",
        ]

    def rights_used(self, account: str) -> set[Right]:
        notes = (note for note in self._of(account) if "objectRef" in note)  # not /apis or /version
        return {_right(note["objectRef"], note["verb"]) for note in notes}

    def refused(self, account: str) -> list[str]:
        """What was forbidden, in the words of the server."""
        return [
            note["responseStatus"].get("message", "")
            for note in self._of(account)
            if note["responseStatus"]["code"] == 403
        ]

    def _of(self, account: str) -> Iterator[Json]:
        namespace, _, name = account.partition("/")
        for line in self._notes.read_text().splitlines():
            note = json.loads(line)
            if note["user"]["username"] == f"system:serviceaccount:{namespace}:{name}":
                yield note

    @property
    def _notes(self) -> Path:
        return self.directory / "audit.log"


def started(lab: ApiServers, name: str) -> Audited:
    """A cluster that nobody else knows of: whoever asks for it ends it."""
    directory = lab.directory / f"{name}-{secrets.token_hex(4)}"
    directory.mkdir(mode=0o700)
    cluster = Audited(directory.name, lab.assets, lab.etcd, directory)
    cluster.start()
    cluster.wait_until_ready()
    return cluster


def granted(roles: Iterable[Json]) -> set[Right]:
    """What Roles and ClusterRoles allow, right by right. Names of objects are left to the server."""
    return {
        Right(role["metadata"].get("namespace", ""), group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def covers(right: Right, used: set[Right]) -> bool:
    """Whether it was used, in its namespace or, if it is for all of them, in any."""
    return any(one[1:] == right[1:] and right.namespace in {"", one.namespace} for one in used)


def _right(found: Json, verb: str) -> Right:
    resource, part = found["resource"], found.get("subresource", "")
    return Right(
        found.get("namespace", ""),
        found.get("apiGroup", ""),
        f"{resource}/{part}" if part else resource,
        verb,
    )
