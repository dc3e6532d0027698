"""Two clusters as liqoctl and kubectl would see them: real programs that keep their state in a directory.

    liqo = FakeLiqo(tmp_path)
    liqo.behave("liqoctl peer", "fail", "no route to host")
    peering = LiqoctlPeering(liqo.kubeconfigs, "home", **liqo.programs)

A program does what Liqo v1.2.0 does, as far as our calls go, unless it has to `fail`, to `hang`, to `say`
something else, or to `wait` until the file `waiting` is removed, and fail then.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

_PROGRAM = """#!{python} -IS
import json, os, pathlib, subprocess, sys, time

name = pathlib.Path(sys.argv[0]).name
state = pathlib.Path(os.environ["FAKE_LIQO"])
words, flags, rest = [], {{}}, list(sys.argv[1:])
while rest:
    word = rest.pop(0)
    if not word.startswith("--"):
        words.append(word)
    elif "=" in word:
        flags.setdefault(word.partition("=")[0][2:], []).append(word.partition("=")[2])
    elif word in ("--skip-confirm", "--ignore-not-found"):
        flags[word[2:]] = [True]
    else:
        flags.setdefault(word[2:], []).append(rest.pop(0))

def note(what):
    with open(state / "calls", "ab", 0) as calls:
        calls.write(json.dumps(what).encode() + b"\\n")

def slices(cluster):
    folder = state / "slices" / cluster
    folder.mkdir(parents=True, exist_ok=True)
    return folder

def peered(kubeconfig):
    return state / "peered" / pathlib.Path(kubeconfig).stem

note([name, *sys.argv[1:]])
verb = " ".join([name, *words[: 2 if words[0] == "create" else 1]])
how, _, text = os.environ.get("FAKE_" + verb.upper().replace(" ", "_"), "").partition(":")
if how == "fail":
    print("INFO  trying", file=sys.stderr)
    print(text, file=sys.stderr)
    sys.exit(1)
if how == "hang":
    child = subprocess.Popen(["sleep", "600"])
    (state / "pids").write_text(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(600)
if how == "wait":
    (state / "waiting").touch()
    while (state / "waiting").exists():
        time.sleep(0.005)
    sys.exit(3)
if how == "say":
    print(text)
    sys.exit(0)

if verb == "liqoctl peer":
    peered(flags["remote-kubeconfig"][0]).touch()
elif verb == "liqoctl unpeer":
    found = peered(flags["remote-kubeconfig"][0])
    if not found.exists():
        sys.exit("no foreign cluster " + found.name)
    found.unlink()
    for one in slices(found.name).iterdir():
        one.unlink()
elif verb == "liqoctl create resourceslice":
    cluster = flags["remote-cluster-id"][0]
    if not (state / "peered" / cluster).exists():
        sys.exit("tenant namespace not found for cluster " + cluster)
    amounts = {{"cpu": flags["cpu"][0], "memory": flags["memory"][0], "pods": "110"}}
    amounts.update(one.split("=") for one in flags.get("resource", []))
    accepted = [{{"type": kind, "status": "Accepted"}} for kind in ("Authentication", "Resources")]
    ready = [{{"type": "Ready", "status": "True"}}]
    objects = [
        {{"kind": "ResourceSlice", "metadata": {{"name": words[2]}},
          "status": {{"conditions": accepted, "resources": amounts}}}},
        {{"kind": "Node", "metadata": {{"name": words[2]}},
          "status": {{"conditions": ready, "allocatable": amounts}}}},
    ]
    (slices(cluster) / words[2]).write_text(json.dumps(objects))
else:
    cluster = flags.get("namespace", [""])[0].removeprefix("liqo-tenant-")
    kind, _, wanted = words[1].partition("/")
    if kind.startswith("identities"):
        found = [{{"kind": "Identity", "metadata": {{"name": wanted}}}}
                 for one in (state / "peered").iterdir() if "controlplane-" + one.name == wanted]
        print(json.dumps(found[0]) if found else "")
    elif verb == "kubectl delete":
        (slices(cluster) / wanted).unlink(missing_ok=True)
    else:
        found = [json.loads(one.read_text()) for one in slices(cluster).iterdir()
                 if wanted in ("", one.name)]
        items = [one for pair in found for one in (pair if wanted else pair[:1])]
        print(json.dumps({{"kind": "List", "items": items}}))
note("end")
"""


class FakeLiqo:
    """The programs, the kubeconfigs, and what became of them."""

    def __init__(self, root: Path) -> None:
        self.root = root / "liqo"
        self.kubeconfigs = root / "kubeconfigs"
        for directory in (self.root / "peered", self.root / "slices", self.kubeconfigs):
            directory.mkdir(parents=True)
        for cluster in ("home", "one", "two"):
            (self.kubeconfigs / f"{cluster}.kubeconfig").write_text("{}")
        for name in ("liqoctl", "kubectl"):
            program = self.root / name
            program.write_text(_PROGRAM.format(python=sys.executable))
            program.chmod(0o755)
        self.environment = {**os.environ, "FAKE_LIQO": str(self.root)}

    @property
    def programs(self) -> dict[str, Any]:
        """Arguments of `LiqoctlPeering`."""
        return {
            "liqoctl": str(self.root / "liqoctl"),
            "kubectl": str(self.root / "kubectl"),
            "environment": self.environment,
        }

    def behave(self, command: str, how: str = "", text: str = "") -> None:
        """From now on a command fails, hangs, waits or says something else; without `how` it works again."""
        self.environment["FAKE_" + command.upper().replace(" ", "_")] = f"{how}:{text}"

    @property
    def log(self) -> list[Any]:
        """What was called, as lists of arguments, and `end` where a program ended by itself."""
        calls = self.root / "calls"
        lines = calls.read_bytes().splitlines() if calls.exists() else []
        return [msgspec.json.decode(line) for line in lines]

    @property
    def commands(self) -> list[str]:
        """The verbs of what was called."""
        return [" ".join(call[:2]) for call in self.log if call != "end"]

    @property
    def peered(self) -> set[str]:
        return {one.name for one in (self.root / "peered").iterdir()}

    @property
    def slices(self) -> set[str]:
        return {one.name for one in (self.root / "slices").glob("*/*")}

    def slice(self, cluster: str, name: str) -> Path:
        """The file of the slice and its node."""
        return self.root / "slices" / cluster / name
