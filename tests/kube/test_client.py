"""Each call of the client on a real API server."""

import asyncio
import json
import sys

import msgspec
import pytest

import config_maps
from config_maps import CONFIG_MAPS, Metadata
from kubelend.core.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    Unauthenticated,
)
from kubelend.kube import config
from kubelend.kube.client import PAGE_SIZE, Client
from kubelend.kube.config import EXEC_VERSIONS, DataOrFile, ExecPlugin
from kubelend.kube.resources import Resource
from waiting import until

pytestmark = pytest.mark.timeout(120)


class Widget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a kind that a test defines, with a status of its own."""

    metadata: Metadata
    spec: dict[str, int] = {}
    status: dict[str, int] = {}


WIDGETS = Resource("test.kubelend.io", "v1", "widgets", "Widget", Widget)
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def definition(resource):
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": free, "status": free}}
    version = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{resource.group}"},
        "spec": {
            "group": resource.group,
            "scope": "Namespaced",
            "names": {"plural": resource.plural, "kind": resource.kind},
            "versions": [version],
        },
    }


@pytest.fixture
async def widgets(kube_client):
    with_kind = json.loads(await kube_client.raw("POST", DEFINITIONS, definition(WIDGETS)))

    async def are_served():
        await kube_client.list(WIDGETS)
        return True

    await until(are_served, retry=lambda error: isinstance(error, NotFound))
    yield WIDGETS
    await kube_client.raw("DELETE", f"{DEFINITIONS}/{with_kind['metadata']['name']}")


async def test_server_says_what_it_is(kube_client):
    assert "gitVersion" in json.loads(await kube_client.raw("GET", "/version"))
    assert b"apiserver_request_total" in await kube_client.raw("GET", "/metrics")


async def test_object_lives_and_ends(kube_client, namespace):
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace, x="1"))
    assert made.metadata.uid
    assert await kube_client.find(CONFIG_MAPS, "a", namespace) == made
    changed = msgspec.structs.replace(made, data={"x": "2"})
    replaced = await kube_client.update(CONFIG_MAPS, changed)
    assert (await kube_client.find(CONFIG_MAPS, "a", namespace)).data == {"x": "2"}
    assert replaced.metadata.resource_version != made.metadata.resource_version
    await kube_client.delete(CONFIG_MAPS, "a", namespace)
    assert await kube_client.find(CONFIG_MAPS, "a", namespace) is None


async def test_object_that_is_gone_can_be_deleted_and_made_again(kube_client, namespace):
    await kube_client.delete(CONFIG_MAPS, "a", namespace)
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace))
    await kube_client.delete(CONFIG_MAPS, "a", namespace)
    again = await kube_client.create(CONFIG_MAPS, made)
    assert again.metadata.uid != made.metadata.uid


async def test_two_objects_of_one_name_are_told_from_two_writers_of_one(kube_client, namespace):
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace))
    with pytest.raises(AlreadyExists, match='configmaps "a" already exists'):
        await kube_client.create(CONFIG_MAPS, made)
    await kube_client.update(CONFIG_MAPS, msgspec.structs.replace(made, data={"x": "1"}))
    with pytest.raises(Conflict, match="has been modified") as caught:
        await kube_client.update(CONFIG_MAPS, msgspec.structs.replace(made, data={"x": "2"}))
    assert type(caught.value) is Conflict


async def test_replacing_what_is_gone_does_not_make_it(kube_client, namespace):
    with pytest.raises(NotFound):
        await kube_client.update(CONFIG_MAPS, config_maps.make("a", namespace))


async def test_patch_leaves_alone_what_it_does_not_name(kube_client, namespace):
    await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace, x="1", y="2", z="3"))
    change = {"data": {"x": "9", "y": None}}
    patched = await kube_client.patch(CONFIG_MAPS, "a", namespace, change)
    assert patched.data == {"x": "9", "z": "3"}


async def test_patch_of_what_has_changed_is_refused(kube_client, namespace):
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace))
    known = {"metadata": {"resourceVersion": made.metadata.resource_version}}
    await kube_client.patch(CONFIG_MAPS, "a", namespace, known | {"data": {"x": "1"}})
    with pytest.raises(Conflict, match="has been modified"):
        await kube_client.patch(CONFIG_MAPS, "a", namespace, known | {"data": {"x": "2"}})


async def test_only_the_object_that_was_meant_is_deleted(kube_client, namespace):
    made = await kube_client.create(CONFIG_MAPS, config_maps.make("a", namespace))
    with pytest.raises(Conflict):
        await kube_client.delete(CONFIG_MAPS, "a", namespace, uid="another")
    await kube_client.delete(CONFIG_MAPS, "a", namespace, uid=made.metadata.uid)
    assert await kube_client.find(CONFIG_MAPS, "a", namespace) is None


async def test_object_with_a_finalizer_waits_for_it(kube_client, namespace):
    held = config_maps.ConfigMap(Metadata("a", namespace, finalizers=("kubelend.io/test",)))
    await kube_client.create(CONFIG_MAPS, held)
    await kube_client.delete(CONFIG_MAPS, "a", namespace)
    assert await kube_client.find(CONFIG_MAPS, "a", namespace)
    await kube_client.patch(CONFIG_MAPS, "a", namespace, {"metadata": {"finalizers": None}})
    assert await kube_client.find(CONFIG_MAPS, "a", namespace) is None


async def test_spec_and_status_are_written_apart(kube_client, namespace, widgets):
    wanted = Widget(Metadata("w", namespace), spec={"a": 1}, status={"b": 1})
    made = await kube_client.create(widgets, wanted)
    assert made.status == {}
    change = {"status": {"b": 2}, "spec": {"a": 2}}
    patched = await kube_client.patch(widgets, "w", namespace, change, subresource="status")
    assert (patched.spec, patched.status) == ({"a": 1}, {"b": 2})
    replaced = await kube_client.update(
        widgets, msgspec.structs.replace(patched, spec={"a": 3}, status={"b": 3})
    )
    assert (replaced.spec, replaced.status) == ({"a": 3}, {"b": 2})


async def test_kind_that_is_not_defined_is_told_from_an_object_that_is_not_there(kube_client):
    unknown = Resource("nowhere.kubelend.io", "v1", "widgets", "Widget", Widget)
    for call in (
        kube_client.find(unknown, "a", "default"),
        kube_client.list(unknown),
        kube_client.delete(unknown, "a", "default"),
    ):
        with pytest.raises(NotFound, match="apply the CRDs"):
            await call


async def test_what_is_wrong_is_said_in_the_words_of_the_server(kube_client, namespace):
    with pytest.raises(InvalidInput, match="lowercase RFC 1123 subdomain"):
        await kube_client.create(CONFIG_MAPS, config_maps.make("No Name", namespace))


async def test_all_pages_are_of_one_version(kube_client, namespace):
    names = {f"many-{number:04}" for number in range(2 * PAGE_SIZE + 50)}
    made = (config_maps.make(name, namespace, labels={"many": "yes"}) for name in names)
    await asyncio.gather(*(kube_client.create(CONFIG_MAPS, one) for one in made))
    listing = await kube_client.list(CONFIG_MAPS, namespace, labels="many=yes")
    assert {one.metadata.name for one in listing.objects} == names
    newest = max(int(one.metadata.resource_version) for one in listing.objects)
    assert int(listing.resource_version) >= newest


async def test_list_is_of_those_that_were_chosen(kube_client, namespace):
    for name, colour in {"a": "red", "b": "blue", "c": "red"}.items():
        await kube_client.create(
            CONFIG_MAPS, config_maps.make(name, namespace, labels={"colour": colour})
        )
    red = await kube_client.list(CONFIG_MAPS, namespace, labels="colour=red")
    assert [one.metadata.name for one in red.objects] == ["a", "c"]
    one = await kube_client.list(CONFIG_MAPS, namespace, fields="metadata.name=b")
    assert [each.metadata.name for each in one.objects] == ["b"]
    everywhere = await kube_client.list(CONFIG_MAPS, labels="colour=blue")
    assert [each.metadata.namespace for each in everywhere.objects] == [namespace]


async def test_stranger_may_nothing(kube, namespace):
    own = config.config_from_kubeconfig(kube.kubeconfig_for("mallory"))
    async with Client.open(own) as client:
        with pytest.raises(Forbidden, match='User "mallory" cannot list resource "configmaps"'):
            await client.list(CONFIG_MAPS, namespace)


async def test_token_that_is_none_is_not_believed(kube):
    known = config.config_from_kubeconfig(kube.admin_kubeconfig)
    own = config.KubeConfig(
        server=known.server, authorities=known.authorities, token=DataOrFile(b"hunter2")
    )
    async with Client.open(own) as client:
        with pytest.raises(Unauthenticated) as caught:
            await client.raw("GET", "/api/v1/namespaces")
    assert "hunter2" not in str(caught.value)


def account_of(kube, namespace, name):
    """A service account's access, by a token in the kubeconfig."""
    kube.kubectl("create", "serviceaccount", name, f"--namespace={namespace}")
    return config.config_from_kubeconfig(kube.kubeconfig_of_account(name, namespace))


async def who(client):
    """As whom the server knows us."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
    said = json.loads(await client.raw("POST", path, review))
    return said["status"]["userInfo"]["username"].rpartition(":")[2]


async def test_account_is_known_by_a_token_in_a_file_that_is_replaced(kube, namespace, tmp_path):
    first, second = (account_of(kube, namespace, name) for name in ("first", "second"))
    token = tmp_path / "token"
    token.write_bytes(first.token.read())
    own = msgspec.structs.replace(first, token=DataOrFile(path=token), origin=None)
    async with Client.open(own) as client:
        assert await who(client) == "first"
        token.write_bytes(second.token.read())
        assert await who(client) == "second"


async def test_account_is_known_by_what_a_plugin_says(kube, namespace):
    robot = account_of(kube, namespace, "robot")
    status = {"token": robot.token.read().decode()}
    said = {"apiVersion": EXEC_VERSIONS[0], "kind": "ExecCredential", "status": status}
    plugin = ExecPlugin(sys.executable, EXEC_VERSIONS[0], ("-c", f"print({json.dumps(said)!r})"))
    own = msgspec.structs.replace(robot, token=DataOrFile(), plugin=plugin, origin=None)
    async with Client.open(own) as client:
        assert await who(client) == "robot"


async def test_user_is_known_by_a_certificate_that_is_replaced(kube, tmp_path):
    path = tmp_path / "config"
    path.write_bytes(kube.kubeconfig_for("alice").read_bytes())
    async with Client.open(config.config_from_kubeconfig(path)) as client:
        assert await who(client) == "alice"
        path.write_bytes(kube.kubeconfig_for("bob").read_bytes())
        assert await who(client) == "bob"


async def test_administrator_may_act_for_somebody(kube):
    own = config.config_from_kubeconfig(kube.admin_kubeconfig)
    for_jane = msgspec.structs.replace(
        own, impersonation=(("Impersonate-User", "jane"),), origin=None
    )
    async with Client.open(for_jane) as client:
        assert await who(client) == "jane"
