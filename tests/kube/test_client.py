"""The client on a real API server; single responses and credentials are tested in tests/unit/kube."""

import asyncio
import json

import msgspec
import pytest

import config_maps
from config_maps import CONFIG_MAPS
from kubelend.core.errors import (
    AlreadyExists,
    Conflict,
    NotFound,
    Unauthenticated,
)
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.kube.config import DataOrFile
from kubelend.kube.resources import Resource

pytestmark = pytest.mark.timeout(120)


async def test_object_is_created_replaced_deleted_and_created_again(kube_client, namespace):
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace, x="1"))
    assert made.metadata.uid
    assert await kube_client.find(CONFIG_MAPS, "a", namespace) == made
    changed = msgspec.structs.replace(made, data={"x": "2"})
    replaced = await kube_client.update(CONFIG_MAPS, changed)
    assert (await kube_client.find(CONFIG_MAPS, "a", namespace)).data == {"x": "2"}
    assert replaced.metadata.resource_version != made.metadata.resource_version
    for _ in range(2):
        await kube_client.delete(CONFIG_MAPS, "a", namespace)
    assert await kube_client.find(CONFIG_MAPS, "a", namespace) is None
    with pytest.raises(NotFound):
        await kube_client.update(CONFIG_MAPS, made)
    again = await kube_client.create(CONFIG_MAPS, made)
    assert again.metadata.uid != made.metadata.uid


async def test_existing_name_and_older_version_are_different_conflicts(kube_client, namespace):
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace))
    with pytest.raises(AlreadyExists, match='configmaps "a" already exists'):
        await kube_client.create(CONFIG_MAPS, made)
    await kube_client.update(CONFIG_MAPS, msgspec.structs.replace(made, data={"x": "1"}))
    with pytest.raises(Conflict, match="has been modified") as caught:
        await kube_client.update(CONFIG_MAPS, msgspec.structs.replace(made, data={"x": "2"}))
    assert type(caught.value) is Conflict


async def test_patch_of_an_older_version_is_a_conflict(kube_client, namespace):
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace))
    known = {"metadata": {"resourceVersion": made.metadata.resource_version}}
    await kube_client.patch(CONFIG_MAPS, "a", namespace, known | {"data": {"x": "1"}})
    with pytest.raises(Conflict, match="has been modified"):
        await kube_client.patch(CONFIG_MAPS, "a", namespace, known | {"data": {"x": "2"}})


async def test_object_with_another_uid_is_not_deleted(kube_client, namespace):
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace))
    with pytest.raises(Conflict):
        await kube_client.delete(CONFIG_MAPS, "a", namespace, uid="another")
    await kube_client.delete(CONFIG_MAPS, "a", namespace, uid=made.metadata.uid)
    assert await kube_client.find(CONFIG_MAPS, "a", namespace) is None


async def test_undefined_kind_is_not_a_missing_object(kube_client):
    unknown = Resource("nowhere.kubelend.io", "v1", "widgets", "Widget", config_maps.ConfigMap)
    for call in (
        kube_client.find(unknown, "a", "default"),
        kube_client.list(unknown),
        kube_client.delete(unknown, "a", "default"),
    ):
        with pytest.raises(NotFound, match="apply the CRDs"):
            await call


async def test_all_pages_are_of_one_version(kube_client, namespace):
    paged = msgspec.structs.replace(CONFIG_MAPS, page_size=20)
    names = {f"many-{number}" for number in range(50)}
    made = (config_maps.make(name, namespace, labels={"many": "yes"}) for name in names)
    await asyncio.gather(*(kube_client.create(CONFIG_MAPS, one) for one in made))
    listing = await kube_client.list(paged, namespace, labels="many=yes")
    assert {one.metadata.name for one in listing.objects} == names
    newest = max(int(one.metadata.resource_version) for one in listing.objects)
    assert int(listing.resource_version) >= newest


async def test_invalid_token_is_rejected(kube):
    known = config.config_from_kubeconfig(kube.admin_kubeconfig)
    own = config.KubeConfig(
        server=known.server, authorities=known.authorities, token=DataOrFile(b"hunter2")
    )
    async with Client.open(own) as client:
        with pytest.raises(Unauthenticated) as caught:
            await client.raw("GET", "/api/v1/namespaces")
    assert "hunter2" not in str(caught.value)


async def who(client):
    """As whom the server knows us."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    said = json.loads(await client.raw("POST", path, review))
    return said["status"]["userInfo"]["username"].rpartition(":")[2]


async def test_replaced_certificate_is_another_user(kube, tmp_path):
    path = tmp_path / "config"
    path.write_bytes(kube.kubeconfig_for("alice").read_bytes())
    async with Client.open(config.config_from_kubeconfig(path)) as client:
        assert await who(client) == "alice"
        path.write_bytes(kube.kubeconfig_for("bob").read_bytes())
        assert await who(client) == "bob"
