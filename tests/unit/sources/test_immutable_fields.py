"""Objects outside Kubernetes refuse the changes of a spec that an API server refuses."""

import pytest
from msgspec.structs import fields, replace
from structlog.testing import capture_logs

import make
import object_samples
from kubelend.core.errors import InvalidInput
from kubelend.sources.file_objects import FileObjects
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.objects import Metadata, ResourceRequest, ResourceRequestSpec

EMPTY = ResourceRequest(Metadata("sample"), ResourceRequestSpec("1", "1Gi"))
FULL = replace(object_samples.RESOURCE_REQUEST.spec, renew=False)
NAMES = {one.name: one.encode_name for one in fields(ResourceRequestSpec) if one.name != "renew"}
MANIFEST = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: sample}
spec: {requestedCPU: "1", requestedMemory: 1Gi, %s}
"""


async def test_of_what_was_sent_to_the_broker_only_renew_can_be_changed():
    objects = MemoryObjects(lambda: make.T0)
    made = await objects.apply(EMPTY)
    for name, shown in NAMES.items():
        changed = replace(made.spec, **{name: getattr(FULL, name)})
        with pytest.raises(InvalidInput, match=f"spec.{shown}: cannot be changed"):
            await objects.apply(replace(made, spec=changed))
    assert await objects.find(ResourceRequest, made.key) == made
    renewed = await objects.apply(replace(made, spec=replace(made.spec, renew=True)))
    assert renewed.spec.renew


async def test_edited_file_is_ignored_with_one_log_line_until_it_is_valid_again(tmp_path):
    objects = FileObjects(tmp_path, lambda: make.T0)
    path = tmp_path / "requests" / "default.sample.yaml"

    def write(spec):
        path.write_text(MANIFEST % spec)
        for _ in range(3):
            objects.scan()

    write("wait: 5m")
    made = await objects.find(ResourceRequest, "default/sample")
    with capture_logs() as logs:
        write("wait: 9m")
    assert await objects.find(ResourceRequest, "default/sample") == made
    problem = "spec.wait: cannot be changed; delete the object and create it again"
    assert [(line["event"], line["error"]) for line in logs] == [
        ("Ignoring invalid object file", problem)
    ]
    assert problem in objects.problem
    write("wait: 5m, renew: true")
    found = await objects.find(ResourceRequest, "default/sample")
    assert found is not None
    assert (found.spec.wait, found.spec.renew, objects.problem) == ("5m", True, "")
    objects.close()
