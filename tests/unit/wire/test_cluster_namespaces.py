"""Object names and texts shared by both sides of a cluster namespace, and the rights of its account."""

import pytest

from kubelend.core.errors import InvalidInput, NoCapacity, QueueFull, UnexpectedAnswer
from kubelend.wire import cluster_namespaces
from kubelend.wire.objects import AgentRequest, BrokerResponse


def test_same_key_is_the_same_object_and_another_is_another():
    assert cluster_namespaces.request_object_name("k") == cluster_namespaces.request_object_name(
        "k"
    )
    assert cluster_namespaces.request_object_name("k") != cluster_namespaces.request_object_name(
        "K"
    )


@pytest.mark.parametrize("id", ["rsv-1", "x" * 253, "Has Space", "a/b", "ü"])
def test_names_are_those_of_objects_whatever_the_id(id):
    name = cluster_namespaces.instruction_object_name(id)
    assert name.endswith("-provider")
    assert len(name) <= 253
    assert not set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-.")


@pytest.mark.parametrize("cluster", ["", "a b", "-a", "a/b", "x" * 64])
def test_a_cluster_that_cannot_be_a_label_cannot_have_a_namespace(cluster):
    with pytest.raises(InvalidInput, match="cannot have a cluster namespace"):
        cluster_namespaces.cluster_namespace_manifests(cluster, "rome-ns")


@pytest.mark.parametrize("error", [NoCapacity("none fits", hint="less"), QueueFull("full")])
def test_error_arrives_as_the_class_that_it_was(error):
    found = cluster_namespaces.error_from_response(
        BrokerResponse("q", error=cluster_namespaces.error_text(error))
    )
    assert found is not None
    assert (type(found), found.message, found.hint) == (type(error), error.message, error.hint)


def test_no_error_is_none():
    assert cluster_namespaces.error_from_response(None) is None
    assert cluster_namespaces.error_from_response(BrokerResponse("q")) is None


def test_undecodable_response_is_an_error():
    with pytest.raises(UnexpectedAnswer, match="cannot be decoded"):
        cluster_namespaces.instruction_from_response(BrokerResponse(body="nonsense"))


def test_patch_leaves_nothing_of_the_request_before():
    assert cluster_namespaces.request_fields(AgentRequest("q", "activate")) == {
        "id": "q",
        "verb": "activate",
        "arguments": "",
        "agent": "",
    }


def test_account_is_bound_in_its_own_namespace_only():
    found = cluster_namespaces.cluster_namespace_manifests("rome", "rome-ns")
    kinds = [one["kind"] for one in found]
    assert kinds == ["Namespace", "ClusterSession", "ServiceAccount", "Role", "RoleBinding"]
    assert found[0]["metadata"]["labels"] == {cluster_namespaces.CLUSTER_LABEL: "rome"}
    assert {one["metadata"].get("namespace") for one in found[1:]} == {"rome-ns"}
    [subject] = cluster_namespaces.cluster_namespace_manifests("rome", "rome-ns", user="rome@hub")[
        -1
    ]["subjects"]
    assert (subject["kind"], subject["name"]) == ("User", "rome@hub")
