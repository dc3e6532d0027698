"""What several of the tests on a real API server begin with."""

import pytest

from kube_stores import Place
from post_offices import PostOffice


@pytest.fixture
def place(kube):
    """Where a store can be, or several brokers' one."""
    return Place(kube)


@pytest.fixture
def office(kube):
    """A broker's namespace, in which mailboxes can be made."""
    office = PostOffice(kube)
    yield office
    office.close()
