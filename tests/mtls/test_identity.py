"""Who calls is what the verified certificate says, and nothing else says it."""

import re
import ssl

import aiohttp
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from callers import offer, wish
from kubelend.pki.identity import BROKER_NAME, Profile

ODD_NAMES = [
    "Team A/Cluster_1",
    "Zürich – Süd",
    "50%25 off",
    "a{b}c",
    "what?#&=+;",
    "'quoted\" \\name",
    "日本",
    "...",
    "-",
]


def certificate(certificates, name, *organisations, usage=ExtendedKeyUsageOID.CLIENT_AUTH):
    """A directory with a certificate for this subject, whatever our own profiles would say to it."""
    subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, found) for found in organisations]
    if name is not None:
        subject.append(x509.NameAttribute(NameOID.COMMON_NAME, name))
    return certificates.write(
        f"odd-{name}-{'-'.join(organisations)}", Profile(x509.Name(subject), usage)
    )


@pytest.mark.parametrize("kind", ["stranger", "expired", "early"])
async def test_certificate_that_is_not_valid_is_not_let_in(broker, certificates, kind):
    caller = broker.holder(getattr(certificates, kind)("agent-cluster-1"))
    with pytest.raises(aiohttp.ClientError):
        await caller.get("/healthz")
    assert (await broker.cluster("agent-cluster-1").get("/healthz")).status == 200


async def test_nobody_is_let_in_without_a_certificate(broker):
    bare = ssl.create_default_context(cafile=broker.certificates.server() / "ca.crt")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"https://localhost:{broker.port}/healthz", ssl=bare)


async def test_nobody_is_served_without_tls(broker):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://localhost:{broker.port}/healthz")


async def test_cluster_cannot_advertise_for_another(broker):
    answer = await broker.cluster("b").post("advertisements", offer("a"))
    assert answer.refusal == (403, "Forbidden")
    assert answer.problem.detail == "clusterID 'a' is not the certificate's 'b'"
    assert (await broker.admin().get("advertisements", "a")).status == 404


async def test_requester_in_a_body_is_not_believed(broker):
    await broker.cluster("a").advertise()
    answer = await broker.cluster("b").post("reservations", wish(requesterID="c", clusterID="c"))
    assert answer.json["requesterID"] == "b"


@pytest.mark.parametrize(
    "organisations",
    [
        (),
        ("LiqoResourceBroker",),
        ("LiqoResourceAgent",),
        ("kubelend:cluster",),
        ("Kubelend:Admin",),
        ("LiqoResourceAgent", "Example Ltd"),
    ],
    ids=lambda organisations: ", ".join(organisations) or "none",
)
async def test_any_other_organisation_is_an_ordinary_cluster(broker, certificates, organisations):
    caller = broker.holder(certificate(certificates, "agent", *organisations), "agent")
    await caller.advertise()
    assert (await caller.get("clusters")).refusal == (403, "Forbidden")
    assert (await caller.post("clusters", "agent", "cordon")).refusal == (403, "Forbidden")


async def test_organisations_of_people_are_roles(broker, certificates):
    await broker.cluster("a").advertise()
    admin = broker.holder(certificate(certificates, "ops", "Example Ltd", "kubelend:admin"))
    viewer = broker.holder(certificate(certificates, "ops", "kubelend:viewer"))
    assert (await admin.post("clusters", "a", "cordon")).status == 200
    assert (await viewer.get("clusters")).status == 200
    assert (await viewer.post("clusters", "a", "uncordon")).refusal == (403, "Forbidden")


async def test_brokers_own_certificate_is_no_caller(broker, certificates):
    """Not even of what everyone may call; `test_roles` tries all the rest."""
    own = broker.holder(certificate(certificates, BROKER_NAME, "LiqoResourceBroker"))
    assert (await own.get("version")).refusal == (403, "InvalidIdentity")


async def test_brokers_own_files_do_not_even_connect(broker):
    """They are for serving, and say so."""
    with pytest.raises(aiohttp.ClientError):
        await broker.holder(broker.certificates.server()).get("/healthz")


@pytest.mark.parametrize("name", [None, "bell\a", " a", "a "], ids=repr)
async def test_certificate_without_a_usable_name_is_refused(broker, certificates, name):
    caller = broker.holder(certificate(certificates, name, "LiqoResourceAgent"))
    assert (await caller.get("version")).refusal == (403, "InvalidIdentity")


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_name_that_is_no_dns_label_works_through_the_whole_life(broker, name):
    """It lends, borrows, is found under its name in any path, and is steered by admins."""
    odd, plain, admin = broker.cluster(name), broker.cluster("plain"), broker.admin()
    published = await odd.advertise()
    assert published["advertisement"]["clusterID"] == name
    assert (await odd.read("advertisements", name))["clusterID"] == name
    lent = await plain.reserve(targetClusterID=name)
    assert lent["status"]["message"] == f"Resources locked in cluster {name}"
    assert [found["id"] for found in await odd.read("instructions")] == [lent["id"]]
    assert (await odd.post("instructions", lent["id"], "acknowledge")).status == 200

    await plain.advertise()
    borrowed = await odd.reserve()
    assert borrowed["requesterID"] == name
    for step in ("activate", "renew"):
        assert (await odd.post("reservations", borrowed["id"], step)).status == 200
    assert (await odd.delete("reservations", borrowed["id"])).status == 200
    async with odd.stream() as stream:
        _, hold = await stream.events(2)
        assert hold.told == ("provider", "Hold", lent["id"])

    listed = await admin.read("reservations", cluster=name, role="provider")
    assert [found["id"] for found in listed["reservations"]] == [lent["id"]]
    for step in ("cordon", "uncordon", "drain"):
        assert (await admin.post("clusters", name, step)).status == 200
    assert (await admin.delete("clusters", name)).status == 204
    assert (await odd.get("advertisements", name)).status == 404


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_id_of_a_reservation_is_a_dns_label_whatever_the_requester_is_called(broker, name):
    await broker.cluster("plain").advertise()
    made = await broker.cluster(name).reserve()
    assert re.fullmatch(r"rsv-[a-z0-9][a-z0-9-]*-[a-z0-9]{13,}", made["id"])
    assert len(made["id"]) <= 63
