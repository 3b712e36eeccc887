"""Certificates of a cluster's machines. Their authority follows from the cluster's key, so that
every machine that has the key can make its own, and nothing else has to be carried about.

The private key of the authority is HKDF-SHA256 (RFC 5869) of the cluster's key, as a number of the
curve P-256.
"""

import hmac
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from server.cli.cluster_folder import ClusterFolder, write_own

VALID_FOR = timedelta(days=3650)
# Clocks of machines differ.
VALID_SINCE = timedelta(days=1)
LABEL = b"quire cluster authority"
# FIPS 186-5: the order of P-256.
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def write_certificates(folder: ClusterFolder, key: str, addresses: Iterable[str]) -> None:
    """Write the authority's certificate, and one of this machine with its private key. addresses:
    by which others reach it: names, or numbers."""
    authority_key, own_key = _authority_key(key), ec.generate_private_key(ec.SECP256R1())
    name = _name("quire cluster")
    authority = _begun(name, name, authority_key.public_key(), path_length=0)
    usages = x509.ExtendedKeyUsage(
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    called = x509.SubjectAlternativeName([_alternative(its) for its in sorted(set(addresses))])
    own = _begun(_name("quire cluster machine"), name, own_key.public_key(), path_length=None)
    own = own.add_extension(usages, critical=False).add_extension(called, critical=False)
    for file, begun in ((folder.authority, authority), (folder.certificate, own)):
        signed = begun.sign(authority_key, hashes.SHA256())
        write_own(file, signed.public_bytes(Encoding.PEM).decode())
    private = own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_own(folder.private_key, private.decode())


def _authority_key(key: str) -> ec.EllipticCurvePrivateKey:
    extracted = hmac.digest(LABEL, bytes.fromhex(key), "sha256")
    expanded = [hmac.digest(extracted, b"\x01", "sha256")]
    expanded.append(hmac.digest(extracted, expanded[0] + b"\x02", "sha256"))
    # 64 bytes: what is left of a division by the order is as good as even.
    number = int.from_bytes(b"".join(expanded), "big") % (P256_ORDER - 1) + 1
    return ec.derive_private_key(number, ec.SECP256R1())


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, path_length: int | None
) -> x509.CertificateBuilder:
    """Begin a certificate. path_length: of an authority; None for a machine."""
    now = datetime.now(UTC)
    constraints = x509.BasicConstraints(ca=path_length is not None, path_length=path_length)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID_SINCE)
        .not_valid_after(now + VALID_FOR)
        .add_extension(constraints, critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(address))
    except ValueError:
        return x509.DNSName(address)
