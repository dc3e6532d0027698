"""File systems of their own for tests about full and read-only disks."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path, size: str = "4m") -> Iterator[Path]:
    """A small empty file system at `directory`; the test is skipped where only root may have one."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
