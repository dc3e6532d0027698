"""What several of the tests on a real API server begin with."""

import pytest

from post_offices import PostOffice


@pytest.fixture
def office(kube):
    """A broker's namespace, in which mailboxes can be made."""
    office = PostOffice(kube)
    yield office
    office.close()
