"""The four simulated clusters of the demo, and its requests."""

from __future__ import annotations

from kubelend.wire import bodies

BERLIN, TURIN, ZURICH, PARIS = "berlin", "turin", "zurich", "paris"

CLUSTER_DESCRIPTIONS = {
    # Busy, and without GPUs: the requester.
    BERLIN: """
region: eu-central
seed: 1
nodes:
  - {count: 3, capacity: {cpu: 16, memory: 64Gi}}
pods:
  - {share: 90%, requests: {cpu: 500m, memory: 2Gi}}
cost: {cpuCost: "0.03", memoryCost: "0.004", currency: EUR}
""",
    # With GPUs, cheap.
    TURIN: """
region: eu-south
seed: 2
nodes:
  - {count: 2, capacity: {cpu: 24, memory: 96Gi, nvidia.com/gpu: 4}}
pods:
  - {count: 20, requests: {cpu: "1", memory: 3Gi}}
  - {count: 4, requests: {cpu: 500m, memory: 2Gi, nvidia.com/gpu: 1}}
cost: {cpuCost: "0.03", memoryCost: "0.004", gpuCost: "0.60", currency: EUR}
""",
    # With GPUs, above the price limit of the request.
    ZURICH: """
region: eu-central
seed: 3
nodes:
  - {count: 2, capacity: {cpu: 32, memory: 128Gi, nvidia.com/gpu: 8}}
pods:
  - {count: 30, requests: {cpu: 200m, memory: 512Mi}}
cost: {cpuCost: "0.20", memoryCost: "0.020", gpuCost: "4.50", currency: EUR}
""",
    # Idle and cheapest: the first provider, whose agent is killed.
    PARIS: """
region: eu-west
seed: 4
nodes:
  - {count: 2, capacity: {cpu: 16, memory: 64Gi, nvidia.com/gpu: 2}}
pods:
  - {count: 6, requests: {cpu: 200m, memory: 512Mi}}
cost: {cpuCost: "0.02", memoryCost: "0.003", gpuCost: "0.45", currency: EUR}
""",
}

REQUEST_SPEC = """\
requestedCPU: "4"
requestedMemory: 16Gi
requestedGPU: "1"
duration: 2h
constraints: {maxPricePerHour: "2", currency: EUR}
"""

RESERVATION_REQUEST = bodies.ReservationRequest(
    bodies.Quantities("4", "16Gi", gpu="1"),
    duration="2h",
    constraints=bodies.Constraints(max_price_per_hour="2", currency="EUR"),
)


def request_manifest(name: str, spec: str) -> str:
    """Returns the manifest of a ResourceRequest."""
    lines = "".join(f"  {line}\n" for line in spec.splitlines())
    head = "apiVersion: rear.fluidos.eu/v1alpha1\nkind: ResourceRequest\n"
    return f"{head}metadata: {{name: {name}}}\nspec:\n{lines}"


REQUEST_MANIFEST = request_manifest("training", REQUEST_SPEC)
OVERSIZED_MANIFEST = request_manifest("too-much", 'requestedCPU: "60"\nrequestedMemory: 16Gi\n')
