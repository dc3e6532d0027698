"""Objects in files, for tests that do things to the files."""

from datetime import timedelta

import pytest

import make
from kubelend.sources.file_objects import FileObjects

QUICK = timedelta(milliseconds=5)


@pytest.fixture
async def open_objects(tmp_path):
    opened = []

    def open_objects(**parameters):
        opened.append(FileObjects(tmp_path, lambda: make.T0, **{"poll": QUICK} | parameters))
        return opened[-1]

    yield open_objects
    for objects in opened:
        await objects.close()


@pytest.fixture
def objects(open_objects):
    return open_objects(settle=timedelta())


@pytest.fixture
def file(tmp_path):
    """Where the file of `default/sample` is."""
    (tmp_path / "resourcerequests").mkdir(exist_ok=True)
    return tmp_path / "resourcerequests" / "default.sample.yaml"
