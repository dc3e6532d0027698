"""DER by hand, for certificate requests that no library would make."""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

SEQUENCE, INTEGER, BITS = 0x30, 0x02, 0x03
ECDSA_WITH_SHA256 = bytes.fromhex("300a06082a8648ce3d040302")
RSA_ENCRYPTION = bytes.fromhex("300d06092a864886f70d0101010500")


def wrapped(tag: int, content: bytes) -> bytes:
    """One element."""
    length = len(content)
    if length < 0x80:
        return bytes([tag, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + content


def unwrapped(element: bytes) -> bytes:
    """The content of one element."""
    return element[2 if element[1] < 0x80 else 2 + (element[1] & 0x7F) :]


def integer(number: int) -> bytes:
    return wrapped(INTEGER, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def rsa_key(modulus: int, exponent: int) -> bytes:
    """A public key, whatever its numbers are."""
    numbers = wrapped(SEQUENCE, integer(modulus) + integer(exponent))
    return wrapped(SEQUENCE, RSA_ENCRYPTION + wrapped(BITS, b"\0" + numbers))


def signed(content: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request of this content, under a good signature of this key."""
    signature = key.sign(content, ec.ECDSA(hashes.SHA256()))
    return wrapped(SEQUENCE, content + ECDSA_WITH_SHA256 + wrapped(BITS, b"\0" + signature))


def request_pem(encoded: bytes) -> bytes:
    text = base64.encodebytes(encoded)
    return b"-----BEGIN CERTIFICATE REQUEST-----\n%s-----END CERTIFICATE REQUEST-----\n" % text
