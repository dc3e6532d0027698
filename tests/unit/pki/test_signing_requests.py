"""Certificate signing requests: whatever is sent, the answer is a proven key and a claim, or a refusal."""

import base64
import functools
import re
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import openssl
from issuers import key_of
from kubelend.core.errors import InvalidIdentity, InvalidInput
from kubelend.core.lifecycle import Role
from kubelend.pki import csr, files, identity
from kubelend.pki.authority import Authority

NOW = datetime.now(UTC)

KINDS = ("p256", "p384", "rsa", "ed25519")
P256 = key_of("p256")


@functools.cache
def request_of(kind):
    """As PEM and as DER."""
    text = csr.make_csr("a", Role.VIEWER, key_of(kind))
    return text, base64.b64decode("".join(text.splitlines()[1:-1]))


# -- DER by hand, for requests that no library would make

SEQUENCE, INTEGER, BITS = 0x30, 0x02, 0x03
ECDSA_WITH_SHA256 = bytes.fromhex("300a06082a8648ce3d040302")
RSA_ENCRYPTION = bytes.fromhex("300d06092a864886f70d0101010500")


def wrapped(tag, content):
    """One element."""
    length = len(content)
    if length < 0x80:
        return bytes([tag, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + content


def unwrapped(element):
    """The content of one element."""
    return element[2 if element[1] < 0x80 else 2 + (element[1] & 0x7F) :]


def integer(number):
    return wrapped(INTEGER, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def rsa_key(modulus, exponent):
    """A public key, whatever its numbers are."""
    numbers = wrapped(SEQUENCE, integer(modulus) + integer(exponent))
    return wrapped(SEQUENCE, RSA_ENCRYPTION + wrapped(BITS, b"\0" + numbers))


def signed(content):
    """A request of this content, under a good signature."""
    signature = P256.sign(content, ec.ECDSA(hashes.SHA256()))
    rest = ECDSA_WITH_SHA256 + wrapped(BITS, b"\0" + signature)
    return request_pem(wrapped(SEQUENCE, content + rest))


def request_pem(encoded):
    text = base64.encodebytes(encoded)
    return b"-----BEGIN CERTIFICATE REQUEST-----\n%s-----END CERTIFICATE REQUEST-----\n" % text


# -- requests of the library


def pem(request):
    return request.public_bytes(serialization.Encoding.PEM)


def subject(*names, organisation=None):
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names]
    if organisation:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
    return x509.Name(attributes)


def request(key=P256, name=None, digest=hashes.SHA256(), extensions=()):  # noqa: B008
    name = subject("agent-cluster-1") if name is None else name
    builder = x509.CertificateSigningRequestBuilder(name)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(key, digest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", [Role.CLUSTER, Role.VIEWER, Role.ADMIN], ids=str)
def test_a_request_proves_its_key_and_claims_a_name_and_a_role(kind, role):
    found = csr.check_csr(csr.make_csr("Zürich/1", role, key_of(kind)))
    assert found.public_key == key_of(kind).public_key()
    assert found.claims == identity.Caller("Zürich/1", role)


@openssl.needed
@pytest.mark.parametrize("kind", KINDS)
def test_openssl_verifies_what_is_made(kind, tmp_path):
    (tmp_path / "csr").write_text(csr.make_csr("agent-cluster-1", Role.VIEWER, key_of(kind)))
    verdict = openssl.run("req", "-in", tmp_path / "csr", "-noout", "-verify", "-subject")
    assert verdict.returncode == 0
    assert "verify OK" in verdict.stderr + verdict.stdout
    assert "CN=agent-cluster-1" in verdict.stdout.replace(" = ", "=")


@openssl.needed
def test_what_openssl_makes_is_understood_also_with_the_older_header(tmp_path):
    made = openssl.said(
        *("req", "-new", "-newkey", "rsa:2048", "-nodes"),
        *("-keyout", tmp_path / "key", "-subj", "/O=kubelend:admin/CN=alice"),
    )
    for text in (made, made.replace("CERTIFICATE REQUEST", "NEW CERTIFICATE REQUEST")):
        assert csr.check_csr(text).claims == identity.Caller("alice", Role.ADMIN)


def test_the_key_is_not_in_the_request():
    made = csr.make_csr("a", Role.CLUSTER, P256)
    secret = P256.private_numbers().private_value.to_bytes(32, "big")
    assert secret not in base64.b64decode("".join(made.splitlines()[1:-1]))


def test_nothing_that_is_asked_for_gets_into_the_certificate(tmp_path):
    greedy = request(
        name=subject("root", organisation="kubelend:admin"),
        extensions=[
            x509.BasicConstraints(ca=True, path_length=None),
            x509.SubjectAlternativeName([x509.DNSName("liqo-resource-broker")]),
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        ],
    )
    found = csr.check_csr(pem(greedy))
    authority = Authority.create("test-ca", now=NOW)
    signed = authority.sign(identity.client_profile("agent-cluster-1"), found.public_key, now=NOW)
    usual = authority.issue(identity.client_profile("agent-cluster-1"), now=NOW).certificate
    assert signed.subject == usual.subject
    kinds = {extension.oid: extension.critical for extension in signed.extensions}
    assert kinds == {extension.oid: extension.critical for extension in usual.extensions}
    constraints = signed.extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca
    usage = signed.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert list(usage.value) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert files.is_certificate_of(signed, P256)


KIND = "key type of the certificate request"


@pytest.mark.parametrize(
    "key, complaint",
    [
        (lambda: rsa.generate_private_key(65537, 1024), "RSA key of 1024 bits; use 2048 to 8192"),
        (lambda: rsa.generate_private_key(65537, 2047), "an RSA key of 2047 bits"),
        (lambda: rsa.generate_private_key(3, 2048), "an unsafe exponent; use 65537"),
        (lambda: ec.generate_private_key(ec.SECP521R1()), "is not supported; use ECDSA with"),
        (lambda: ec.generate_private_key(ec.SECP256K1()), KIND),
        (lambda: dsa.generate_private_key(2048), KIND),
        (ed448.Ed448PrivateKey.generate, KIND),
    ],
    ids=["rsa 1024", "rsa 2047", "exponent 3", "p521", "secp256k1", "dsa", "ed448"],
)
def test_a_weak_or_unusual_key_is_refused(key, complaint):
    made = key()
    digest = None if isinstance(made, ed448.Ed448PrivateKey) else hashes.SHA256()
    with pytest.raises(InvalidInput, match=complaint):
        csr.check_csr(pem(request(made, digest=digest)))


def test_a_giant_rsa_key_is_refused_before_its_signature_is_looked_at():
    # Making a real one takes minutes, so the number is no product of primes, and its key is not there.
    modulus = (1 << 8999) | (1 << 4000) | 1
    with pytest.raises(InvalidInput, match="an RSA key of 9000 bits"):
        csr.check_csr(forged(rsa_key(modulus, 65537)))


@pytest.mark.parametrize("exponent", [1, 65538, 2**31 + 1, 2**200 + 1], ids=str)
def test_an_unusual_exponent_is_refused(exponent):
    modulus = key_of("rsa").public_key().public_numbers().n
    with pytest.raises(InvalidInput, match=r"unsafe exponent|cannot be decoded"):
        csr.check_csr(forged(rsa_key(modulus, exponent)))


def forged(info):
    """A request for this public key, which another key has signed."""
    content = unwrapped(request().tbs_certrequest_bytes)
    return signed(wrapped(SEQUENCE, content.replace(encoded(P256), info)))


def encoded(key):
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_a_request_for_somebody_elses_key_is_refused():
    assert csr.check_csr(forged(encoded(P256))).public_key == P256.public_key()
    with pytest.raises(InvalidInput, match="not signed by its own key"):
        csr.check_csr(forged(encoded(ec.generate_private_key(ec.SECP256R1()))))


def test_a_request_of_another_version_is_refused():
    content = request().tbs_certrequest_bytes.replace(b"\x02\x01\x00", b"\x02\x01\x01", 1)
    with pytest.raises(InvalidInput, match="certificate request is corrupt"):
        csr.check_csr(signed(content))


@openssl.needed
def test_an_outdated_digest_is_refused(tmp_path):
    made = openssl.said(
        *("req", "-new", "-sha1", "-newkey", "rsa:2048", "-nodes"),
        *("-keyout", tmp_path / "key", "-subj", "/CN=a"),
    )
    with pytest.raises(InvalidInput, match="signed with sha1; use sha256 or stronger"):
        csr.check_csr(made)


VALID = csr.make_csr("agent-cluster-1", Role.CLUSTER, P256)


NO_PEM = "not a certificate request in PEM form"
CORRUPT = "certificate request is corrupt"
NO_REQUESTS = {
    "nothing": ("", NO_PEM),
    "garbage": ("garbage", NO_PEM),
    "bytes": (b"\xff\xfe", NO_PEM),
    "half a character": ("\ud800", NO_PEM),
    "other letters": (pem(request()).replace(b"REQUEST", b"RE\xc3\x9cUEST"), NO_PEM),
    "der": (request().public_bytes(serialization.Encoding.DER), NO_PEM),
    "two": (VALID + VALID, "more than one PEM block in the certificate request; send one"),
    "another label": (VALID.replace("REQUEST", "REQUESTS"), NO_PEM),
    "text before it": ("Subject: a\n" + VALID, NO_PEM),
    "cut off": (VALID[: len(VALID) // 2], NO_PEM),
    "first line": (re.sub("-----\n.*", "-----\nAAAA", VALID, count=1), CORRUPT),
    "changed": (VALID.replace("=", "").replace("M", "A", 3), CORRUPT),
    "long": (VALID + " " * csr.MAX_CSR_LENGTH, "exceeds 16384 bytes"),
    "very long": (b"A" * 10_000_000, "exceeds 16384 bytes"),
}


@pytest.mark.parametrize("kind", NO_REQUESTS)
def test_what_is_no_request_is_refused(kind):
    sent, complaint = NO_REQUESTS[kind]
    with pytest.raises(InvalidInput, match=complaint):
        csr.check_csr(sent)


def test_a_private_key_sent_by_mistake_is_refused_and_not_repeated():
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key = P256.private_bytes(serialization.Encoding.PEM, form, plain).decode()
    with pytest.raises(InvalidInput) as raised:
        csr.check_csr(VALID + key)
    assert not any(line in str(raised.value) for line in key.splitlines()[1:-1])


@pytest.mark.parametrize(
    "name, complaint",
    [
        (x509.Name([]), "no common name"),
        (subject(organisation="kubelend:admin"), "no common name"),
        (subject("a", "b"), "several common names"),
        (subject("a\nb"), "control or invisible"),
        (subject(" "), "is empty"),
    ],
    ids=["nothing", "only a role", "two names", "control character", "blank"],
)
def test_a_request_that_names_nobody_is_refused(name, complaint):
    with pytest.raises(InvalidIdentity, match=f"certificate request: .*{complaint}"):
        csr.check_csr(pem(request(name=name)))


def test_names_that_the_broker_would_refuse_are_not_asked_for():
    with pytest.raises(InvalidIdentity):
        csr.make_csr("liqo-resource-broker", Role.CLUSTER, P256)


# -- input of any kind

REQUEST = x509.load_pem_x509_csr(request_of("p256")[0].encode())
SIGNED, NAME = REQUEST.tbs_certrequest_bytes, REQUEST.subject.public_bytes()

some = settings(suppress_health_check=[HealthCheck.too_slow])


def checked(sent):
    """Whose request it is; None if it is refused. Anything else fails the test."""
    try:
        return csr.check_csr(sent)
    except InvalidInput as refusal:
        said = str(refusal)
    assert 20 < len(said) < 300
    return None


@st.composite
def with_other_bytes(draw, whole):
    changed = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        changed[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


@st.composite
def with_a_piece_replaced(draw, whole, piece, longest):
    start = draw(st.integers(0, len(whole)))
    end = draw(st.integers(start, min(len(whole), start + longest)))
    return whole[:start] + draw(piece) + whole[end:]


@some
@given(
    st.binary(max_size=3000) | st.text(max_size=3000) | st.binary(max_size=1000).map(request_pem)
)
def test_random_input_is_refused(sent):
    assert checked(sent) is None


@some
@given(kind=st.sampled_from(["p256", "rsa", "ed25519"]), data=st.data())
def test_a_changed_request_is_refused_or_says_the_same(kind, data):
    text, der = request_of(kind)
    cut = with_a_piece_replaced(der, st.binary(max_size=40), len(der))
    changed = (with_other_bytes(der) | cut).map(request_pem)
    found = checked(data.draw(changed | with_a_piece_replaced(text, st.text(max_size=3), 3)))
    assert found is None or found == csr.check_csr(text)


@some
@given(with_other_bytes(SIGNED))
def test_a_request_changed_before_it_was_signed_is_refused_or_for_the_same_key(content):
    found = checked(signed(content))
    assert found is None or found.public_key == P256.public_key()


@some
@given(tag=st.integers(0, 63), value=st.binary(max_size=80), padding=st.binary(max_size=8))
@example(tag=BITS, value=b"\0bits", padding=b"")
@example(tag=12, value=b"", padding=b"")
@example(tag=12, value=b"a" * 80, padding=b"")
@example(tag=12, value=b"\xff", padding=b"")
def test_any_common_name_of_any_kind_is_refused_or_one_that_can_be_shown(tag, value, padding):
    common_name = b"\x06\x03\x55\x04\x03" + wrapped(tag, value) + padding
    name = wrapped(SEQUENCE, wrapped(0x31, wrapped(SEQUENCE, common_name)))
    version, rest = unwrapped(SIGNED)[:3], unwrapped(SIGNED)[3 + len(NAME) :]
    found = checked(signed(wrapped(SEQUENCE, version + name + rest)))
    assert found is None or found.claims.name.isprintable()
