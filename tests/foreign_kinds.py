"""The kinds of cert-manager and of Prometheus' operator, as far as our manifests use them.

Neither is installed in a test's cluster. These definitions know only the fields that the real ones have
and our manifests use, and require what those require: all else is refused when it is applied strictly.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubelend.envtest import servers
from kubelend.envtest.servers import ApiServers, LocalCluster

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
NUMBER: Json = {"type": "integer"}
SWITCH: Json = {"type": "boolean"}
TEXTS: Json = {"type": "array", "items": TEXT}
NAMES: Json = {"type": "object", "additionalProperties": TEXT}


def fields(required: str = "", /, **properties: Json) -> Json:
    found: Json = {"type": "object", "properties": properties}
    return found | ({"required": required.split()} if required else {})


def many(item: Json) -> Json:
    return {"type": "array", "items": item}


ISSUER = fields(selfSigned=fields(), ca=fields("secretName", secretName=TEXT))

CERTIFICATE = fields(
    "secretName issuerRef",
    secretName=TEXT,
    issuerRef=fields("name", name=TEXT, kind=TEXT, group=TEXT),
    isCA=SWITCH,
    commonName={"type": "string", "maxLength": 64},
    subject=fields(organizations=TEXTS),
    duration=TEXT,
    renewBefore=TEXT,
    privateKey=fields(
        algorithm={"type": "string", "enum": ["RSA", "ECDSA", "Ed25519"]},
        size=NUMBER,
        rotationPolicy={"type": "string", "enum": ["Never", "Always"]},
    ),
    usages=many({"type": "string", "enum": ["digital signature", "server auth", "client auth"]}),
    dnsNames=TEXTS,
    ipAddresses=TEXTS,
)

MONITOR = fields(
    "endpoints selector",
    selector=fields(matchLabels=NAMES),
    endpoints=many(fields(port=TEXT, interval=TEXT)),
)

_RULE = fields(
    "expr",
    alert=TEXT,
    expr={"x-kubernetes-int-or-string": True},
    labels=NAMES,
    annotations=NAMES,
    **{"for": TEXT},
)
RULES = fields(groups=many(fields("name", name=TEXT, rules=many(_RULE))))

KINDS = (
    ("cert-manager.io", "Issuer", "issuers", ISSUER),
    ("cert-manager.io", "ClusterIssuer", "clusterissuers", ISSUER),
    ("cert-manager.io", "Certificate", "certificates", CERTIFICATE),
    ("monitoring.coreos.com", "ServiceMonitor", "servicemonitors", MONITOR),
    ("monitoring.coreos.com", "PrometheusRule", "prometheusrules", RULES),
)


@contextmanager
def cluster(lab: ApiServers, name: str) -> Iterator[LocalCluster]:
    """One that has these kinds, and none of ours until a manifest brings it."""
    [started] = lab.start(f"{name}-{secrets.token_hex(4)}")
    servers.create_crds(started, [_definition(*kind) for kind in KINDS])
    yield started
    started.kill()


def _definition(group: str, kind: str, plural: str, spec: Json) -> Json:
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": fields("spec", spec=spec)},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural},
            "scope": "Cluster" if kind.startswith("Cluster") else "Namespaced",
            "versions": [version],
        },
    }
