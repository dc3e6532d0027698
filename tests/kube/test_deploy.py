"""Every manifest that we ship is applied to a real API server, strictly: no unknown field is let pass."""

import json
import os
import secrets
import subprocess

import pytest
import yaml

import charts
import foreign_kinds
import kube_objects
from charts import KUSTOMIZE
from kubelend.cli import app, options

pytestmark = [pytest.mark.timeout(180), pytest.mark.kube]

EVERYWHERE = """
metrics:
  serviceMonitor: {enabled: true, labels: {release: prometheus}}
  rules: {enabled: true}
  dashboard: {enabled: true}
image: {pullSecrets: [{name: registry}]}
podLabels: {team: platform}
podAnnotations: {note: x}
nodeSelector: {kubernetes.io/os: linux}
tolerations: [{key: infra, operator: Exists}]
affinity: {podAntiAffinity: {}}
priorityClassName: system-cluster-critical
extraVolumes: [{name: more, emptyDir: {}}]
extraVolumeMounts: [{name: more, mountPath: /more}]
"""
BROKER_EVERYTHING = f"""
{EVERYWHERE}
replicas: 3
store: {{kind: kubernetes}}
grantKey: {{secret: grants}}
interfaces: [http, kubernetes]
clusterNamespaces: true
flags: {{stale-after: 5m, rate-limit: 200, trust-proxies: true}}
tls: {{names: [broker.example.org, 192.0.2.1, "2001:db8::1"]}}
certManager: {{enabled: true}}
enrolment: {{enabled: true}}
service: {{type: LoadBalancer, externalTrafficPolicy: Local}}
networkPolicy:
  callersFrom: [{{ipBlock: {{cidr: 10.0.0.0/8}}}}]
  metricsFrom: [{{ipBlock: {{cidr: 10.0.0.0/8}}}}]
"""
OWN_AUTHORITY = """
enrolment: {enabled: true}
authority: {secret: ca, passphraseSecret: pass}
"""
ISSUER = "certManager: {enabled: true, issuer: {kind: ClusterIssuer, name: company}}"
URL = 'broker: {url: "https://broker.example.org:8443"}'
BY_KUBECONFIG = """
broker: {transport: kubernetes, kubeconfigSecret: hub, namespace: cluster-berlin}
cluster: {id: berlin}
"""
JOINS = f"""
{URL}
certificate:
  from: join
  join: {{url: "https://broker.example.org:8444", clusterID: berlin, caHash: "sha256:{"0" * 64}"}}
"""
AGENT_EVERYTHING = f"""
{URL}
{EVERYWHERE}
certificate:
  from: certManager
  certManager: {{clusterID: berlin, issuer: {{kind: ClusterIssuer, name: kubelend}}}}
cluster: {{name: Berlin, region: eu, labels: {{tier: gold, a: b}}}}
prices: {{cpu: "0.05", memory: "0.01", currency: EUR}}
policy: {{allow: [paris]}}
namespaces: {{requests: default}}
flags: {{enforce: false, finished-for: 5m}}
"""

POLICIES = "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"

CASES = {
    "broker-default": ("broker", "{}"),
    "broker-in-memory": ("broker", "store: {kind: memory}"),
    "broker-with-own-authority": ("broker", OWN_AUTHORITY),
    "broker-three": (
        "broker",
        "{replicas: 3, store: {kind: kubernetes}, grantKey: {secret: grants}}",
    ),
    "broker-of-objects": ("broker", "{interfaces: [kubernetes], store: {kind: kubernetes}}"),
    "broker-with-cluster-namespaces": ("broker", "clusterNamespaces: true"),
    "broker-everything": ("broker", BROKER_EVERYTHING),
    "broker-with-an-issuer": ("broker", ISSUER),
    "agent-default": ("agent", URL),
    "agent-that-measures": ("agent", "broker: {transport: none}"),
    "agent-by-kubeconfig": ("agent", BY_KUBECONFIG),
    "agent-that-joins": ("agent", JOINS),
    "agent-with-liqo": ("agent", f"{{{URL}, peering: {{mode: liqo}}}}"),
    "agent-with-liqoctl": ("agent", f"{{{URL}, peering: {{kubeconfigsSecret: providers}}}}"),
    "agent-everything": ("agent", AGENT_EVERYTHING),
}
"""Charts and values, as an operator writes them."""

OWN = """
namespace: lending
resources: [BASE]
images: [{name: kubelend, newName: registry.example.org/kubelend}]
patches:
- target: {kind: Deployment}
  patch: |
    apiVersion: apps/v1
    kind: Deployment
    metadata: {name: kubelend-agent}
    spec:
      template:
        spec:
          containers:
          - name: agent
            env: [{name: KUBELEND_BROKER_URL, value: "https://hub:8443"}]
"""


@pytest.fixture(scope="module")
def cluster(lab):
    with foreign_kinds.cluster(lab, "deploy") as cluster:
        kube_objects.create_namespace(cluster, "liqo")
        yield cluster


def make_namespace(cluster, name):
    """Of the strictest kind: what is not allowed to any pod of it is an error."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return kube_objects.create_namespace(cluster, name, **labels)


def apply(cluster, found, *flags):
    path = cluster.directory / "applied.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": found}))
    return cluster.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "--validate=strict",
        f"--filename={path}",
        *flags,
    )


@pytest.fixture(params=CASES.values(), ids=list(CASES), scope="module")
def case(request, helm, cluster):
    """A rendering in a namespace of its own, as (which chart, its objects, namespace)."""
    name, values = request.param[0], yaml.safe_load(request.param[1])
    namespace = f"case-{secrets.token_hex(4)}"
    return name, charts.render(helm, name, values, f"--namespace={namespace}", POLICIES), namespace


def test_every_object_is_accepted(case, cluster):
    _, found, namespace = case
    make_namespace(cluster, namespace)
    assert len(apply(cluster, found).splitlines()) == len(found)


def test_pod_is_allowed_where_only_restricted_ones_are(case, cluster):
    """A Deployment is always accepted; whether its pods will be, nobody says before they are made."""
    _, found, _ = case
    namespace = make_namespace(cluster, f"pods-{secrets.token_hex(4)}")
    [deployment] = charts.of_kind(found, "Deployment")
    spec = deployment["spec"]["template"]["spec"] | {"priorityClassName": ""}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": namespace}}
    assert "pod/p" in apply(cluster, [pod | {"spec": spec}], "--dry-run=server")
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["limits"]["memory"]


def test_program_knows_every_flag(case):
    name, found, _ = case
    command = app.build_app().commands[name]
    jobs = [
        one["spec"]["template"]["spec"]["containers"][0] for one in charts.of_kind(found, "Job")
    ]
    for container in (charts.container(found), *jobs):
        program, *arguments = options.normalize_arguments(container["args"])
        assert program == name
        command.make_context(name, arguments)


def test_every_mounted_thing_is_a_volume_and_every_probe_a_port(case):
    _, found, _ = case
    [deployment] = charts.of_kind(found, "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    container = charts.container(found)
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounted = {
        mount["name"]
        for one in (*spec["containers"], *spec.get("initContainers", ()))
        for mount in one["volumeMounts"]
    }
    assert mounted == volumes
    ports = {port["name"] for port in container["ports"]}
    probes = [one["httpGet"]["port"] for name, one in container.items() if name.endswith("Probe")]
    services = charts.of_kind(found, "Service")
    targets = [port["targetPort"] for one in services for port in one["spec"]["ports"]]
    [policy] = charts.of_kind(found, "NetworkPolicy")
    let_in = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert {*probes, *targets, *let_in} <= ports


def test_selectors_find_the_pods(case):
    _, found, _ = case
    [deployment] = charts.of_kind(found, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    [policy] = charts.of_kind(found, "NetworkPolicy")
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        policy["spec"]["podSelector"]["matchLabels"],
        *(
            one["spec"]["selector"]["matchLabels"]
            for one in charts.of_kind(found, "PodDisruptionBudget")
        ),
        *(one["spec"]["selector"] for one in charts.of_kind(found, "Service")),
    ]
    leads = {"kubelend.io/role": "leader"}.items()
    assert all(selector.items() - leads <= labels for selector in selectors)


@pytest.mark.parametrize(
    "directory",
    [
        "broker/base",
        "broker/overlays/replicated",
        "broker/overlays/cluster-namespaces",
        "broker/overlays/monitoring",
        "broker/overlays/cert-manager",
        "agent/base",
        "agent/overlays/cluster-namespace",
        "agent/overlays/liqo",
        "agent/overlays/monitoring",
        "agent/overlays/cert-manager",
    ],
)
def test_kustomizations_are_accepted(cluster, directory):
    applied = cluster.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "--validate=strict",
        f"--kustomize={KUSTOMIZE / directory}",
    )
    assert "deployment.apps/kubelend-" in applied
    secret = "broker" if directory == "agent/overlays/cluster-namespace" else "tls"
    mode = f"{{.spec.template.spec.volumes[?(@.name=='{secret}')].secret.defaultMode}}"
    name = f"kubelend-{directory.partition('/')[0]}"
    shown = cluster.kubectl(
        "get", "deployment", name, "--namespace=kubelend", f"--output=jsonpath={mode}"
    )
    assert int(shown) == 0o440


def test_another_namespace_image_and_broker_are_set_by_kustomize_alone(cluster, tmp_path):
    base = os.path.relpath(KUSTOMIZE / "agent" / "base", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(OWN.replace("BASE", base))
    found = charts.load(cluster.kubectl("kustomize", str(tmp_path)))
    container = charts.container(found)
    assert container["image"].startswith("registry.example.org/kubelend:")
    assert {"name": "KUBELEND_BROKER_URL", "value": "https://hub:8443"} in container["env"]
    subjects = [
        subject["namespace"]
        for binding in charts.of_kind(found, "RoleBinding", "ClusterRoleBinding")
        for subject in binding["subjects"]
    ]
    assert set(subjects) == {"lending"}


def test_renderings_in_the_tree_are_those_of_the_charts(helm):
    done = subprocess.run(
        [charts.ROOT / "hack" / "deploy-manifests", "--check"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "KUBELEND_HELM": str(helm)},
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "name, flags", [("broker", ()), ("agent", ("--set=broker.url=https://b",))]
)
def test_charts_are_good_style(helm, name, flags):
    said = charts.run(helm, "lint", "--strict", charts.CHARTS / f"kubelend-{name}", *flags)
    assert "0 chart(s) failed" in said
