"""Whatever is sent as a certificate request, the answer is the request or a clear refusal."""

import base64

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import der
from kubelend.core.errors import InvalidInput
from kubelend.core.lifecycle import Role
from kubelend.pki import csr
from kubelend.pki.keys import PrivateKey

P256 = ec.generate_private_key(ec.SECP256R1())
KEYS: list[PrivateKey] = [
    P256,
    rsa.generate_private_key(65537, 2048),
    ed25519.Ed25519PrivateKey.generate(),
]
VALID = [csr.make_csr("agent-cluster-1", Role.VIEWER, key) for key in KEYS]
DER = [base64.b64decode("".join(text.splitlines()[1:-1])) for text in VALID]
REQUEST = x509.load_pem_x509_csr(VALID[0].encode())
SIGNED, NAME = REQUEST.tbs_certrequest_bytes, REQUEST.subject.public_bytes()

some = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])


def checked(sent):
    """Whose request it is; None if it is refused. Anything else fails the test."""
    try:
        return csr.check_csr(sent)
    except InvalidInput as refusal:
        said = str(refusal)
    assert 20 < len(said) < 300
    return None


@some
@given(st.binary(max_size=3000) | st.text(max_size=3000))
def test_random_input_is_refused(sent):
    assert checked(sent) is None


@some
@given(st.binary(max_size=1000).map(der.request_pem))
def test_random_content_in_the_right_wrapping_is_refused(sent):
    assert checked(sent) is None


@some
@given(which=st.sampled_from(range(len(DER))), data=st.data())
def test_a_changed_request_is_refused_or_says_the_same(which, data):
    changed = bytearray(DER[which])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    found = checked(der.request_pem(bytes(changed)))
    assert found is None or found == csr.check_csr(VALID[which])


@some
@given(st.data())
def test_a_request_changed_before_it_was_signed_is_refused_or_for_the_same_key(data):
    content = bytearray(SIGNED)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    found = checked(der.request_pem(der.signed(bytes(content), P256)))
    assert found is None or found.public_key == P256.public_key()


@some
@given(tag=st.integers(0, 63), value=st.binary(max_size=80), padding=st.binary(max_size=8))
@example(tag=der.BITS, value=b"\0bits", padding=b"")
@example(tag=12, value=b"", padding=b"")
@example(tag=12, value=b"a" * 80, padding=b"")
@example(tag=12, value=b"\xff", padding=b"")
def test_any_common_name_of_any_kind_is_refused_or_one_that_can_be_shown(tag, value, padding):
    common_name = b"\x06\x03\x55\x04\x03" + der.wrapped(tag, value) + padding
    name = der.wrapped(0x30, der.wrapped(0x31, der.wrapped(0x30, common_name)))
    version, rest = der.unwrapped(SIGNED)[:3], der.unwrapped(SIGNED)[3 + len(NAME) :]
    content = der.wrapped(der.SEQUENCE, version + name + rest)
    found = checked(der.request_pem(der.signed(content, P256)))
    assert found is None or found.claims.name.isprintable()


@some
@given(which=st.sampled_from(range(len(DER))), data=st.data())
def test_a_request_with_pieces_cut_out_or_put_in_is_refused_or_says_the_same(which, data):
    whole = DER[which]
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    found = checked(
        der.request_pem(whole[:start] + data.draw(st.binary(max_size=40)) + whole[end:])
    )
    assert found is None or found == csr.check_csr(VALID[which])


@some
@given(which=st.sampled_from(range(len(DER))), data=st.data())
def test_a_changed_text_is_refused_or_says_the_same(which, data):
    text = VALID[which]
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 3)))
    found = checked(text[:start] + data.draw(st.text(max_size=3)) + text[end:])
    assert found is None or found == csr.check_csr(VALID[which])
