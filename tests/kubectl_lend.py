"""`kubectl lend` as a user runs it, with a kubeconfig.

alice = kubectl_lend.user(assets, kubeconfig, tmp_path)
assert alice.lend("get", "reservations").code == 0       in this process, with the user's environment
assert alice.run("kubectl", "lend", "version").code == 0 the real kubectl and our console script
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import yaml

from kubelend.cli import main
from kubelend.envtest import credentials
from kubelend.envtest.assets import Assets
from waiting import PATIENCE


class Result(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class User(NamedTuple):
    """A user with a kubeconfig, whose environment has no other settings."""

    environment: dict[str, str]

    def lend(self, *arguments: str, **variables: str) -> Result:
        environment = mock.patch.dict(os.environ, self.environment | variables, clear=True)
        out, err = io.StringIO(), io.StringIO()
        with environment, redirect_stdout(out), redirect_stderr(err):
            code = main.run(list(arguments), "kubectl lend")
        return Result(code, out.getvalue(), err.getvalue())

    def run(self, *command: str, **variables: str) -> Result:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            env=self.environment | variables,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | {"PYTHONUNBUFFERED": "1"},
        )


def user(assets: Assets, kubeconfig: Path, home: Path) -> User:
    paths = (assets.kubectl.parent, Path(sys.executable).parent)
    clean = {name: text for name, text in os.environ.items() if not name.startswith("KUBE")}
    return User(
        clean
        | {
            "PATH": ":".join([*map(str, paths), os.environ["PATH"]]),
            "KUBECONFIG": str(kubeconfig),
            "KUBECACHEDIR": str(home / "cache"),
            "HOME": str(home),
        }
    )


def service_account(
    administrator: Path, assets: Assets, name: str, rules: Mapping[str, str], namespace: str
) -> Path:
    """The kubeconfig of a new service account with these rights (verbs by kind) in a namespace."""

    def kubectl(*arguments: str) -> str:
        command = [str(assets.kubectl), f"--kubeconfig={administrator}", *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=2 * PATIENCE
        ).stdout

    where = f"--namespace={namespace}"
    kubectl("create", "serviceaccount", name, where)
    for kind, verbs in rules.items():
        role = f"{name}-{kind.partition('.')[0]}"
        kubectl("create", "role", role, where, f"--verb={verbs}", f"--resource={kind}")
        account = f"--serviceaccount={namespace}:{name}"
        kubectl("create", "rolebinding", role, where, f"--role={role}", account)
    token = kubectl("create", "token", name, where).strip()
    path = credentials.write_token_kubeconfig(
        administrator, administrator.with_name(f"{name}.kubeconfig"), name, token
    )
    content = yaml.safe_load(path.read_text())
    content["contexts"][0]["context"]["namespace"] = namespace
    path.write_text(yaml.safe_dump(content))
    return path
