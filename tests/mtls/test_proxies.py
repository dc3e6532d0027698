"""Behind a proxy that ends TLS, the caller is who the passed-on certificate names."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec.structs import replace

import brokers
from callers import offer
from clocks import Clock
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from mtls_headers import HEADER, passed_on


@pytest.fixture
def now():
    return datetime.now(UTC)


@pytest.fixture
async def behind(certificates, now):
    async with brokers.running(certificates, clock=Clock(now), trust_proxies=True) as broker:
        yield broker


async def publish(caller, name, headers):
    content = json.dumps(offer(name)).encode()
    return await caller.call("POST", "advertisements", content=content, headers=headers)


async def version(caller, headers):
    return await caller.call("GET", "version", headers=headers)


def proxy_of(broker, certificates):
    return broker.holder(
        certificates.write("proxy", identity.client_profile("envoy", Role.PROXY)), "envoy"
    )


async def test_the_passed_on_certificate_names_the_caller(behind, certificates):
    proxy = proxy_of(behind, certificates)
    for name in ("a", "b"):
        headers = passed_on(certificates.cluster(name))
        answer = await publish(proxy, name, headers)
        assert answer.status == 200
    headers = passed_on(certificates.cluster("a"))
    answer = await publish(proxy, "b", headers)
    assert answer.refusal == (403, "Forbidden")


async def test_without_being_told_to_the_broker_trusts_no_proxy(broker, certificates):
    headers = passed_on(certificates.cluster("a"))
    answer = await publish(proxy_of(broker, certificates), "a", headers)
    assert answer.refusal == (403, "InvalidIdentity")


async def test_the_header_of_anybody_else_is_not_read(behind, certificates):
    headers = passed_on(certificates.cluster("a"))
    answer = await publish(behind.cluster("b"), "a", headers)
    assert answer.refusal == (403, "Forbidden")


async def test_a_proxy_may_do_nothing_itself(behind, certificates):
    answer = await proxy_of(behind, certificates).get("version")
    assert answer.refusal == (403, "InvalidIdentity")


@pytest.mark.parametrize("kind", ["stranger", "expired", "early"])
async def test_a_proxy_cannot_pass_on_what_we_would_not_let_in(behind, certificates, kind):
    headers = passed_on(getattr(certificates, kind)("a"))
    answer = await publish(proxy_of(behind, certificates), "a", headers)
    assert answer.refusal == (403, "InvalidIdentity")


@pytest.mark.parametrize(
    "header", ["", ":", "::", ":!!!:", ":AAAA:", "AAAA", ":" + "A" * 7000 + ":"]
)
async def test_what_is_no_certificate_is_refused(behind, certificates, header):
    answer = await version(proxy_of(behind, certificates), {HEADER: header})
    assert answer.refusal == (403, "InvalidIdentity")


async def test_a_proxy_cannot_pass_on_another_proxy_nor_the_broker(behind, certificates):
    proxy = proxy_of(behind, certificates)
    other = certificates.write("other", identity.client_profile("nginx", Role.PROXY))
    for directory in (other, certificates.server()):
        answer = await version(proxy, passed_on(directory))
        assert answer.refusal == (403, "InvalidIdentity")


async def test_what_is_made_for_servers_or_for_signing_is_passed_on_for_nobody(
    behind, certificates
):
    """Also where its name would be a cluster's: TLS here would not have let it in either."""
    for_servers = replace(identity.client_profile("a"), usage=ExtendedKeyUsageOID.SERVER_AUTH)
    directory = certificates.write("for-servers", for_servers)
    for file in ("tls.crt", "ca.crt"):
        answer = await version(proxy_of(behind, certificates), passed_on(directory, file))
        assert answer.refusal == (403, "InvalidIdentity")
        assert answer.problem.detail == "Client-Cert: certificate is not a client certificate"


async def test_a_known_certificate_is_refused_once_it_has_ended(behind, certificates, now):
    proxy, headers = proxy_of(behind, certificates), passed_on(certificates.cluster("a"))
    assert (await version(proxy, headers)).status == 200
    behind.clock.pass_time(timedelta(days=400))
    assert (await version(proxy, headers)).refusal == (403, "InvalidIdentity")
