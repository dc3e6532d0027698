"""TLS contexts out of bytes: whom to believe, and what to show. `kube.credentials` has them made."""

from __future__ import annotations

import os
import ssl

from kubelend.core.errors import InvalidSettings


def context(
    authorities: bytes, certificate: bytes, key: bytes, *, insecure: bool = False
) -> ssl.SSLContext:
    """Believes these authorities, or the system's if there are none. Shows a certificate if there is one."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    # Every certificate that is given is an anchor, an intermediate one too, as for Go programs.
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if insecure:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    elif authorities:
        _believe(made, authorities)
    else:
        made.load_default_certs()
    if certificate or key:
        _show(made, certificate, key)
    return made


def _believe(made: ssl.SSLContext, authorities: bytes) -> None:
    try:
        made.load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise InvalidSettings(
            "the certificate authority is no certificate in PEM form",
            hint="check certificate-authority(-data) of the kubeconfig",
        ) from error


def _show(made: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # The library takes a file and nothing else; this one is in memory and has no name on any disk.
    descriptor = os.memfd_create("client-certificate")
    try:
        os.write(descriptor, certificate.rstrip() + b"\n" + key)
        # With an empty password an encrypted key fails; with none OpenSSL asks on the terminal.
        made.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    except (ssl.SSLError, OSError) as error:
        raise InvalidSettings(
            "client certificate and key are no pair in PEM form, or the key is encrypted",
            hint="check client-certificate(-data) and client-key(-data) of the kubeconfig",
        ) from error
    finally:
        os.close(descriptor)
