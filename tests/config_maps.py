"""ConfigMaps: the plainest kind that every API server has, for tests that need any kind at all."""

from __future__ import annotations

import msgspec

from kubelend.kube.resources import Resource


class Metadata(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()


class ConfigMap(msgspec.Struct, frozen=True, omit_defaults=True):
    metadata: Metadata
    data: dict[str, str] = {}


CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", ConfigMap)


def make(
    name: str, namespace: str = "default", *, labels: dict[str, str] | None = None, **data: str
) -> ConfigMap:
    return ConfigMap(Metadata(name, namespace, labels=labels or {}), data)
