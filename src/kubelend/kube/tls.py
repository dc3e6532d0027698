"""TLS contexts from PEM bytes."""

from __future__ import annotations

import os
import ssl

from kubelend.core.errors import InvalidSettings


def client_tls_context(
    authorities: bytes, certificate: bytes, key: bytes, *, insecure: bool = False
) -> ssl.SSLContext:
    """Return a client context that trusts these authorities (default: the system's) and presents the
    certificate, if any.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    # Every given certificate is a trust anchor, also an intermediate one, as in Go.
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if insecure:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    elif authorities:
        _trust_authorities(made, authorities)
    else:
        made.load_default_certs()
    if certificate or key:
        _load_client_certificate(made, certificate, key)
    return made


def _trust_authorities(made: ssl.SSLContext, authorities: bytes) -> None:
    try:
        made.load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise InvalidSettings(
            "certificate authority is not a certificate in PEM form",
            hint="check certificate-authority(-data) of the kubeconfig",
        ) from error


def _load_client_certificate(made: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # The ssl module only reads files, so this uses an anonymous one in memory.
    descriptor = os.memfd_create("client-certificate")
    try:
        os.write(descriptor, certificate.rstrip() + b"\n" + key)
        # With an empty password an encrypted key fails; without one OpenSSL would prompt on the terminal.
        made.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    except (ssl.SSLError, OSError) as error:
        raise InvalidSettings(
            "client certificate and key do not match, are not in PEM form, or the key is encrypted",
            hint="check client-certificate(-data) and client-key(-data) of the kubeconfig",
        ) from error
    finally:
        os.close(descriptor)
