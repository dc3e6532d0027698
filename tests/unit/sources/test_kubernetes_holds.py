"""The pod that is a placeholder."""

from kubelend.agent.ports import NewPlaceholder
from kubelend.core.resources import parse_requested
from kubelend.sources import kubernetes_holds
from kubelend.wire.objects import Metadata, ProviderInstruction, ProviderInstructionSpec

SPEC = ProviderInstructionSpec("4", "8Gi", reservation_name="rsv-a", requester_cluster_id="rome")
OWNER = ProviderInstruction(Metadata("rsv-a-provider", "lending", uid="u1"), SPEC)
AMOUNTS = {
    "cpu": "4",
    "memory": "8Gi",
    "gpu": "2",
    "storage": "1Gi",
    "example.com/fpga": "1",
}


def made(**fields):
    wanted = NewPlaceholder(OWNER, "n1", parse_requested(AMOUNTS), **fields)
    return kubernetes_holds.placeholder_body(wanted, "pause", "kubelend-hold")


def test_it_requests_the_amounts_under_the_names_of_kubernetes_and_ends_at_once():
    spec = made()["spec"]
    [container] = spec["containers"]
    devices = {"nvidia.com/gpu": "2", "example.com/fpga": "1"}
    divisible = {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "1Gi"}
    assert container["resources"] == {"requests": divisible | devices, "limits": devices}
    assert (spec["terminationGracePeriodSeconds"], spec["schedulingGates"]) == (0, [])
    assert made(is_gated=True)["spec"]["schedulingGates"] == [{"name": "kubelend.io/held"}]


def test_its_instruction_owns_it():
    metadata = made()["metadata"]
    [owner] = metadata["ownerReferences"]
    assert metadata["namespace"] == "lending"
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
        *("ProviderInstruction", "rsv-a-provider", "u1", True),
    )
