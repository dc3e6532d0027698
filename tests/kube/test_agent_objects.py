"""An agent's objects in a real cluster, where others are at the same objects in the same moment."""

import asyncio
import contextlib
import json
import secrets
from typing import Any

import pytest
from msgspec.structs import replace

import kube_objects
import kube_roles
from kubelend.agent.ports import Listed
from kubelend.core.errors import Conflict, NotFound
from kubelend.kube import resources
from kubelend.sources.kubernetes_objects import KubernetesObjects
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from waiting import PATIENCE, until

pytestmark = pytest.mark.timeout(120)

REQUESTS = resources.resource_for(ResourceRequest)

ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
LOOSE = [
    {"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema", "value": ANYTHING},
]


class Hasty:
    """A client by which somebody else is quicker once: `first` is done just before a write."""

    def __init__(self, client, first):
        self._client = client
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def create(self, *arguments, **options):
        await self._meddle()
        return await self._client.create(*arguments, **options)

    async def patch(self, *arguments, **options):
        await self._meddle()
        return await self._client.patch(*arguments, **options)

    async def _meddle(self):
        first, self._first = self._first, None
        if first is not None:
            await first()


@pytest.fixture
def objects(kube_client, namespace):
    return KubernetesObjects(kube_client, {ResourceRequest: namespace})


@pytest.fixture
def hasty(kube_client):
    def hasty(first):
        client: Any = Hasty(kube_client, first)
        return KubernetesObjects(client, {})

    return hasty


@pytest.fixture
def make_request(namespace):
    def make(renew=False, name="request", **metadata):
        spec = ResourceRequestSpec("1", "1Gi", duration="1h", renew=renew)
        return ResourceRequest(Metadata(name, namespace, **metadata), spec)

    return make


def pending(found):
    return replace(found, status=ResourceRequestStatus(phase="Pending"))


# -- others who are quicker


async def test_concurrent_change_is_a_conflict_with_a_version(objects, hasty, make_request):
    made = await objects.apply(make_request())
    late = hasty(lambda: objects.apply(make_request(renew=True)))
    with pytest.raises(Conflict, match="was modified"):
        await late.apply(replace(made, spec=make_request(renew=True).spec))
    late = hasty(lambda: objects.apply(make_request()))
    newest = await objects.find(ResourceRequest, made.key)
    with pytest.raises(Conflict, match="was modified"):
        await late.set_status(pending(newest))
    found = await objects.find(ResourceRequest, made.key)
    assert (found.spec.renew, found.status.phase) == (False, "")


async def test_concurrent_change_is_kept_without_a_version(objects, hasty, make_request):
    made = await objects.apply(make_request())
    late = hasty(lambda: objects.set_status(pending(made)))
    changed = await late.apply(make_request(renew=True))
    assert (changed.spec.renew, changed.status.phase) == (True, "Pending")


async def test_object_that_is_created_concurrently_is_changed(objects, hasty, make_request):
    late = hasty(lambda: objects.apply(make_request()))
    changed = await late.apply(make_request(renew=True))
    assert (changed.spec.renew, changed.metadata.generation) == (True, 2)


async def test_object_that_is_deleted_concurrently_is_not_recreated(objects, hasty, make_request):
    made = await objects.apply(make_request())
    late = hasty(lambda: objects.delete(ResourceRequest, made.key))
    with pytest.raises(Conflict):
        await late.apply(replace(made, spec=make_request(renew=True).spec))
    made = await objects.apply(make_request())
    late = hasty(lambda: objects.delete(ResourceRequest, made.key))
    assert await late.set_status(pending(replace(made, metadata=make_request().metadata))) is None
    assert await objects.list(ResourceRequest) == []


async def test_what_others_have_written_beside_ours_stays(kube_client, objects, make_request):
    made = await objects.apply(make_request())
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": "u-1"}
    change = {"metadata": {"ownerReferences": [owner], "annotations": {"theirs": "kept"}}}
    await kube_client.patch(REQUESTS, made.metadata.name, made.metadata.namespace, change)
    newest = await objects.find(ResourceRequest, made.key)
    changed = await objects.apply(replace(newest, spec=make_request(renew=True).spec))
    assert changed.metadata.annotations == {"theirs": "kept"}
    path = REQUESTS.path(made.metadata.namespace, made.metadata.name)
    assert b'"ownerReferences"' in await kube_client.raw("GET", path)


# -- where they are, and whether they can be seen


async def test_only_the_namespace_counts_if_one_is_named(kube_client, objects, make_request):
    await kube_objects.make_namespaces(kube_client, "elsewhere")
    elsewhere = replace(make_request(name="other"), metadata=Metadata("other", "elsewhere"))
    made = await objects.apply(make_request())
    await objects.apply(elsewhere)
    assert await objects.list(ResourceRequest) == [made]
    async with contextlib.aclosing(objects.watch(ResourceRequest)) as watch:
        assert await anext(watch) == Listed([made])
    await objects.delete(ResourceRequest, elsewhere.key)


async def test_missing_namespace_is_reported(objects, make_request):
    with pytest.raises(NotFound, match='namespaces "nowhere" not found'):
        await objects.apply(replace(make_request(), metadata=Metadata("a", "nowhere")))


async def test_missing_permission_is_reported_and_waited_for(kube, namespace):
    user = f"agent-{secrets.token_hex(4)}"
    async with kube_objects.opened(kube, user) as client:
        objects = KubernetesObjects(client, {ResourceRequest: namespace})
        async with contextlib.aclosing(objects.watch(ResourceRequest)) as watch:
            first = asyncio.ensure_future(anext(watch))

            forbidden = f'resourcerequests.rear.fluidos.eu is forbidden: User "{user}" cannot list'
            await until(lambda: forbidden in objects.watch_problem)
            kube_roles.grant(kube, user)
            async with asyncio.timeout(PATIENCE):
                assert await first == Listed([])
            following = asyncio.ensure_future(anext(watch))
            await until(lambda: not objects.watch_problem)
            following.cancel()
            await asyncio.wait([following])


async def test_object_that_cannot_be_decoded_is_reported_and_skipped(clusters):
    """Under the definition of another version, or none at all, anything can be there."""
    [cluster] = clusters()
    cluster.kubectl(
        "patch", "crd", "resourcerequests.rear.fluidos.eu", "--type=json", f"-p={json.dumps(LOOSE)}"
    )
    async with kube_objects.opened(cluster) as client:
        objects = KubernetesObjects(client, {})
        path = REQUESTS.path("default")
        head = {"apiVersion": REQUESTS.api_version, "kind": REQUESTS.kind}
        body = {**head, "metadata": {"name": "odd"}, "spec": {"requestedCPU": ["many"]}}
        await client.raw("POST", path, body)
        async with contextlib.aclosing(objects.watch(ResourceRequest)) as watch:
            assert await anext(watch) == Listed([])
            assert "resourcerequests default/odd: " in objects.problem
            spec = {"requestedCPU": "1", "requestedMemory": "1Gi"}
            await client.raw("PUT", f"{path}/odd", await renewed(client, f"{path}/odd", spec))
            found = await anext(watch)
            assert isinstance(found, ResourceRequest)
            assert found.spec.requested_cpu == "1"
            assert objects.problem == ""


async def renewed(client, path, spec):
    return json.loads(await client.raw("GET", path)) | {"spec": spec}


class Counted:
    """A client that counts reads."""

    def __init__(self, client):
        self._client = client
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def find(self, *arguments, **options):
        self.reads += 1
        return await self._client.find(*arguments, **options)


async def test_version_that_was_read_last_is_written_without_another_read(kube_client, namespace):
    client: Any = Counted(kube_client)
    objects = KubernetesObjects(client, {})
    key = f"{namespace}/counted"
    assert await objects.find(ResourceRequest, key) is None
    wanted = ResourceRequest(Metadata("counted", namespace), ResourceRequestSpec("1", "1Gi"))
    made = await objects.apply(wanted)
    metadata = replace(made.metadata, finalizers=("example.org/ours",))
    marked = await objects.apply(replace(made, metadata=metadata))
    written = await objects.set_status(replace(marked, status=ResourceRequestStatus("Pending")))
    assert written is not None
    assert (written.status.phase, client.reads) == ("Pending", 1)
    with pytest.raises(Conflict):
        await objects.set_status(replace(marked, status=ResourceRequestStatus("Failed")))
    await objects.apply(replace(written, metadata=replace(written.metadata, finalizers=())))


async def test_version_that_was_watched_is_written_without_a_read(kube_client, namespace):
    others = KubernetesObjects(kube_client, {})
    client: Any = Counted(kube_client)
    objects = KubernetesObjects(client, {ResourceRequest: namespace})
    wanted = ResourceRequest(Metadata("watched", namespace), ResourceRequestSpec("1", "1Gi"))
    async with contextlib.aclosing(objects.watch(ResourceRequest)) as events:
        assert await anext(events) == Listed([])
        made = await others.apply(wanted)
        seen: Any = await anext(events)
    assert seen == made
    written = await objects.set_status(replace(seen, status=ResourceRequestStatus("Pending")))
    assert written is not None
    assert (written.status.phase, client.reads) == ("Pending", 0)


async def test_object_that_was_deleted_since_it_was_read_has_no_status(kube_client, namespace):
    objects, others = KubernetesObjects(kube_client, {}), KubernetesObjects(kube_client, {})
    made = await objects.apply(
        ResourceRequest(Metadata("gone", namespace), ResourceRequestSpec("1", "1Gi"))
    )
    await others.delete(ResourceRequest, made.key)
    wanted = replace(made, status=ResourceRequestStatus("Pending"))
    assert await objects.set_status(wanted) is None
    with pytest.raises(Conflict):
        await objects.apply(replace(made, spec=replace(made.spec, renew=True)))
