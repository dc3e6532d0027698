"""Addresses are cheap, so whoever can have many counts as one."""

import pytest

from kubelend.kits.ratelimit import rate_limit_key


@pytest.mark.parametrize(
    "remote, counted_as",
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("no address", "no address"),
    ],
)
def test_neighbours_of_ipv6_count_as_one(remote, counted_as):
    assert rate_limit_key(remote) == counted_as
