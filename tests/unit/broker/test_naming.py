"""Names of reservations: Kubernetes takes them, people recognise them, and no two are the same."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.broker import service
from kubelend.core.models import ClusterId

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@given(st.text(min_size=1, max_size=64))
def test_name_is_a_dns_label_whatever_the_requester_is_called(requester):
    name = service.new_reservation_id(ClusterId(requester))
    assert name.startswith("rsv-")
    assert LABEL.fullmatch(name)


@pytest.mark.parametrize(
    "requester, start",
    [
        ("agent-cluster-1", "rsv-agent-cluster-1-"),
        ("Team A/Cluster_1", "rsv-team-a-cluster-1-"),
        ("--x--", "rsv-x-"),
        ("日本", "rsv-cluster-"),
        ("ÄÖÜ", "rsv-cluster-"),
    ],
)
def test_name_begins_with_its_requester(requester, start):
    assert service.new_reservation_id(ClusterId(requester)).startswith(start)


def test_names_made_in_one_moment_differ():
    names = [service.new_reservation_id(ClusterId("r")) for _ in range(50_000)]
    assert len(set(names)) == len(names)


def test_longest_requesters_leave_room_for_what_tells_names_apart():
    names = {service.new_reservation_id(ClusterId("x" * 64)) for _ in range(1000)}
    assert len(names) == 1000
    assert {len(name) for name in names} == {63}
