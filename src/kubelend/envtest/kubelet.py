"""Stands in for the kubelets of a test cluster: pods become Running, and some of them really run.

    python -m kubelend.envtest.kubelet KUBECONFIG PROGRAMS DIRECTORY

It serves all nodes of a cluster but virtual ones, and renews their leases. A pod whose container runs one of
the programs in the directory PROGRAMS, or whose image is ours, becomes a process, with the arguments, the
environment, the mounted Secrets and ConfigMaps and the service account of the container: so Liqo and we run
as the charts install it. All other pods only get the status of a running pod. Logs, kubeconfigs and volumes
are written to DIRECTORY.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import os
import re
import signal
import sys
from asyncio.subprocess import Process
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from kubelend.core.errors import Conflict, KubelendError, NotFound, Unavailable
from kubelend.envtest import assets, credentials
from kubelend.kits import clock, logs, tasks
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.kube import config, informer
from kubelend.kube.client import Client
from kubelend.kube.informer import Deleted, Listed
from kubelend.kube.resources import Resource
from kubelend.wire.objects import Metadata

LEASE_DURATION: Final = timedelta(seconds=40)
LEASE_INTERVAL: Final = timedelta(seconds=10)
RESTART_DELAY: Final = timedelta(seconds=1)
STOP_TIMEOUT: Final = 10.0
TOKEN_SECONDS: Final = 30 * 24 * 3600

_VIRTUAL_NODE_LABEL: Final = "liqo.io/type"
_REFERENCE: Final = re.compile(r"\$\((\w+)\)")
_OWN_IMAGE: Final = re.compile(r"(.*/)?kubelend(:[^/]*)?")
_POD_NETWORK: Final = ipaddress.ip_network("10.244.0.0/16")

log = structlog.get_logger("kubelend.envtest")


class Node(msgspec.Struct, frozen=True):
    metadata: Metadata
    status: dict[str, Any] = {}


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


NODES: Final = Resource("", "v1", "nodes", "Node", Node, namespaced=False)
PODS: Final = Resource("", "v1", "pods", "Pod", Pod)
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease", Node)
"""Only their metadata is read."""
LEASE_NAMESPACE: Final = "kube-node-lease"


class Kubelet:
    """Use `run` as a root task."""

    def __init__(self, client: Client, kubeconfig: Path, programs: Path, directory: Path) -> None:
        self._client = client
        self._kubeconfig = kubeconfig
        self._programs = programs
        self._directory = directory
        self._nodes: dict[str, Node] = {}
        self._pods: dict[str, Pod] = {}
        self._processes: dict[str, Process] = {}
        """By the UID of the pod."""
        self._waiting: set[asyncio.Task[None]] = set()
        """Waits for the end of each process."""
        self._addresses = _POD_NETWORK.hosts()
        self._queue = ReconcileQueue("Pod", self._reconcile, log)

    async def run(self) -> None:
        try:
            await tasks.run_all(
                {
                    "nodes": self._watch_nodes(),
                    "pods": self._watch_pods(),
                    "reconcile": self._queue.run(),
                    "leases": self._renew_leases(),
                }
            )
        finally:
            stopping = list(self._processes.values())
            self._processes.clear()
            await asyncio.gather(*map(_stop, stopping), *self._waiting)

    # -- watches

    async def _watch_nodes(self) -> None:
        async for change in informer.list_and_watch(self._client, NODES):
            match change:
                case Listed(objects):
                    self._nodes = {each.metadata.name: each for each in objects if _is_served(each)}
                case Deleted(found):
                    self._nodes.pop(found.metadata.name, None)
                case Node() if _is_served(change):
                    self._nodes[change.metadata.name] = change
            for key in self._pods:
                self._queue.add(key)

    async def _watch_pods(self) -> None:
        async for change in informer.list_and_watch(self._client, PODS):
            match change:
                case Listed(objects):
                    self._pods = {each.key: each for each in objects}
                    present = {each.metadata.uid for each in objects}
                    for uid in self._processes.keys() - present:
                        await self._end_process(uid)
                    for key in self._pods:
                        self._queue.add(key)
                case Deleted(found):
                    self._pods.pop(found.key, None)
                    await self._end_process(found.metadata.uid)
                case Pod():
                    self._pods[change.key] = change
                    self._queue.add(change.key)

    # -- pods

    async def _reconcile(self, key: str) -> None:
        pod = self._pods.get(key)
        if pod is None or pod.spec.get("nodeName") not in self._nodes:
            return
        with contextlib.suppress(NotFound, Conflict):  # deleted or changed: another event follows
            if pod.metadata.deletion_timestamp is not None:
                await self._end_process(pod.metadata.uid)
                options = {
                    "gracePeriodSeconds": 0,
                    "preconditions": {"uid": pod.metadata.uid},
                }
                path = PODS.path(pod.metadata.namespace, pod.metadata.name)
                await self._client.raw("DELETE", path, options)
                return
            await self._ensure_process(pod)
            if pod.status.get("phase") == "Pending":
                change = {"status": self._running_status(pod)}
                name, namespace = pod.metadata.name, pod.metadata.namespace
                await self._client.patch(PODS, name, namespace, change, subresource="status")

    def _running_status(self, pod: Pod) -> dict[str, Any]:
        now = _timestamp(clock.utc_now())
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": now}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        return {
            "phase": "Running",
            "startTime": now,
            "hostIP": "127.0.0.1",
            "podIP": (address := str(next(self._addresses))),
            "podIPs": [{"ip": address}],
            "conditions": conditions,
            "containerStatuses": [_container_status(each, now) for each in pod.spec["containers"]],
        }

    # -- processes

    async def _ensure_process(self, pod: Pod) -> None:
        program = self._program(pod)
        running = self._processes.get(pod.metadata.uid)
        is_over = running is not None and _runs_once(pod)
        if not program or is_over or (running is not None and running.returncode is None):
            return
        [container] = pod.spec["containers"]
        environment = await self._environment(pod, container)
        mounted = await self._mount_volumes(pod, container)
        arguments = [
            _in_volumes(_expand(each, environment), mounted) for each in container.get("args", ())
        ]
        kubeconfig = await self._account_kubeconfig(pod)
        if Path(program[0]).name == "virtual-kubelet":
            # Each listens on the same port, in the network of its pod.
            arguments.append(f"--listen-port={assets.free_port()}")
            arguments.append(f"--home-kubeconfig={kubeconfig}")
        with (self._directory / f"{pod.metadata.name}.log").open("ab") as stream:
            process = await asyncio.create_subprocess_exec(
                *program,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={"KUBECONFIG": str(kubeconfig), **environment},
            )
        self._processes[pod.metadata.uid] = process
        log.info("Process started", name=pod.key, program=program[-1], pid=process.pid)
        waiting = asyncio.create_task(self._wait_for_end(pod, process))
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)

    async def _wait_for_end(self, pod: Pod, process: Process) -> None:
        code = await process.wait()
        if pod.metadata.uid not in self._processes:
            return
        if _runs_once(pod):
            change = {"status": {"phase": "Failed" if code else "Succeeded"}}
            name, namespace = pod.metadata.name, pod.metadata.namespace
            with contextlib.suppress(NotFound):
                await self._client.patch(PODS, name, namespace, change, subresource="status")
        else:
            log.warning("Process ended, will restart", name=pod.key, code=code)
            self._queue.add_after(pod.key, RESTART_DELAY)

    async def _end_process(self, uid: str) -> None:
        process = self._processes.pop(uid, None)
        if process is not None:
            await _stop(process)

    def _program(self, pod: Pod) -> list[str]:
        """The program of the pod's only container, if we have it."""
        container, *others = pod.spec["containers"]
        command = container.get("command") or [""]
        path = self._programs / Path(command[0]).name
        if others:
            return []
        if not command[0] and _OWN_IMAGE.fullmatch(container["image"]):
            return [sys.executable, "-P", "-m", "kubelend"]
        return [str(path)] if command[0] and path.is_file() else []

    async def _mount_volumes(self, pod: Pod, container: dict[str, Any]) -> dict[str, Path]:
        """Returns the directory of each mount; only Secrets and ConfigMaps have files in them."""
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        found = {}
        for mount in container.get("volumeMounts", ()):
            path = self._directory / pod.metadata.uid / mount["name"]
            path.mkdir(parents=True, exist_ok=True)
            for name, content in (await self._volume_files(pod, volumes[mount["name"]])).items():
                (path / name).write_bytes(content)
            found[mount["mountPath"]] = path
        return found

    async def _volume_files(self, pod: Pod, volume: dict[str, Any]) -> dict[str, bytes]:
        core = f"/api/v1/namespaces/{pod.metadata.namespace}"
        source = volume.get("secret") or volume.get("configMap") or {}
        try:
            if "secret" in volume:
                found = await self._client.raw("GET", f"{core}/secrets/{source['secretName']}")
                data = msgspec.json.decode(found).get("data", {})
                return {name: base64.b64decode(text) for name, text in data.items()}
            if "configMap" in volume:
                found = await self._client.raw("GET", f"{core}/configmaps/{source['name']}")
                data = msgspec.json.decode(found).get("data", {})
                return {name: text.encode() for name, text in data.items()}
        except NotFound as error:
            if not source.get("optional"):
                raise Unavailable(f"volume {volume['name']}: {error}") from error
        return {}

    async def _environment(self, pod: Pod, container: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in container.get("env", ()):
            found[each["name"]] = each.get("value") or await self._value(pod, each)
        return found

    async def _value(self, pod: Pod, variable: dict[str, Any]) -> str:
        match variable.get("valueFrom"):
            case {"fieldRef": {"fieldPath": "metadata.name"}}:
                return pod.metadata.name
            case {"fieldRef": {"fieldPath": "metadata.namespace"}}:
                return pod.metadata.namespace
            case {"fieldRef": {"fieldPath": "status.podIP"}}:
                return "127.0.0.1"
            case {"configMapKeyRef": {"name": name, "key": key}}:
                path = f"/api/v1/namespaces/{pod.metadata.namespace}/configmaps/{name}"
                found = msgspec.json.decode(await self._client.raw("GET", path))
                return str(found["data"][key])
        return ""

    async def _account_kubeconfig(self, pod: Pod) -> Path:
        account, namespace = pod.spec["serviceAccountName"], pod.metadata.namespace
        order = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_SECONDS},
        }
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        answer = msgspec.json.decode(await self._client.raw("POST", path, order))
        target = self._directory / f"{namespace}.{account}.kubeconfig"
        token = answer["status"]["token"]
        return credentials.write_token_kubeconfig(self._kubeconfig, target, account, token)

    # -- leases

    async def _renew_leases(self) -> None:
        """Without them the controller manager marks the nodes as Unknown after some time."""
        while True:
            for name, node in tuple(self._nodes.items()):
                try:
                    await self._renew_lease(name)
                    await self._report_ready(node)
                except KubelendError as error:
                    log.warning(
                        "Failed to renew the lease, will retry", name=name, error=str(error)
                    )
            await asyncio.sleep(LEASE_INTERVAL.total_seconds())

    async def _report_ready(self, node: Node) -> None:
        """After an outage of the API server the controller manager has marked it as Unknown."""
        known = node.status.get("conditions") or []
        conditions = [one | {"status": "True"} if one["type"] == "Ready" else one for one in known]
        if conditions != known:
            change = {"status": {"conditions": conditions}}
            await self._client.patch(NODES, node.metadata.name, "", change, subresource="status")

    async def _renew_lease(self, node: str) -> None:
        spec = {
            "holderIdentity": node,
            "leaseDurationSeconds": int(LEASE_DURATION.total_seconds()),
            "renewTime": f"{clock.utc_now():%Y-%m-%dT%H:%M:%S.%fZ}",
        }
        try:
            await self._client.patch(LEASES, node, LEASE_NAMESPACE, {"spec": spec})
        except NotFound:
            lease = {
                "apiVersion": LEASES.api_version,
                "kind": "Lease",
                "metadata": {"name": node, "namespace": LEASE_NAMESPACE},
                "spec": spec,
            }
            await self._client.raw("POST", LEASES.path(LEASE_NAMESPACE), lease)


def _is_served(node: Node) -> bool:
    return _VIRTUAL_NODE_LABEL not in node.metadata.labels


def _container_status(container: dict[str, Any], now: str) -> dict[str, Any]:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": now}},
        "resources": container.get("resources", {}),
        "allocatedResources": container.get("resources", {}).get("requests", {}),
    }


def _expand(text: str, environment: dict[str, str]) -> str:
    return _REFERENCE.sub(lambda found: environment.get(found[1], found[0]), text)


def _in_volumes(text: str, mounted: dict[str, Path]) -> str:
    """The text with the paths of mounts replaced by those of their directories."""
    paths = "|".join(map(re.escape, sorted(mounted, key=len, reverse=True)))
    pattern = rf"(?<![\w/])(?:{paths})(?!\w)"
    return re.sub(pattern, lambda found: str(mounted[found[0]]), text) if mounted else text


def _runs_once(pod: Pod) -> bool:
    return bool(pod.spec.get("restartPolicy") == "Never")


def _timestamp(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


async def _stop(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _run(kubeconfig: Path, programs: Path, directory: Path) -> None:
    async with Client.open(config.config_from_kubeconfig(kubeconfig)) as client:
        running = asyncio.create_task(Kubelet(client, kubeconfig, programs, directory).run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await running


if __name__ == "__main__":
    os.umask(0o077)
    logs.setup("info")
    asyncio.run(_run(*map(Path, sys.argv[1:])))
