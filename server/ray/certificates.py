"""Makes certificates for a cluster's machines. The private key of the certificate authority is
derived from the cluster's key, so that each machine can sign a certificate that others trust."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from server.cli.cluster_folder import ClusterFolder, write_private

VALID_FOR = timedelta(days=3650)
# A certificate is valid from this long before it is made, because machines' clocks may differ.
VALID_SINCE = timedelta(days=1)
# The order of the elliptic curve P-256, from FIPS 186-5.
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def write_certificates(folder: ClusterFolder, key: str, addresses: Iterable[str]) -> None:
    """Write the authority's certificate, this machine's certificate, and this machine's private
    key. ``addresses`` are this machine's host names and IP addresses."""
    authority_key, own_key = _authority_key(key), ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = x509.SubjectAlternativeName([_alternative(each) for each in sorted(set(addresses))])
    authority = _sign("quire cluster", authority_key, authority_key, is_authority=True)
    own = _sign(
        "quire cluster machine", own_key, authority_key, x509.ExtendedKeyUsage(usages), names
    )
    private = own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(folder.authority, authority)
    write_private(folder.certificate, own)
    write_private(folder.private_key, private.decode())


def _authority_key(key: str) -> ec.EllipticCurvePrivateKey:
    derive = HKDF(SHA256(), length=64, salt=b"quire cluster authority", info=b"").derive
    # 64 bytes in place of 32 make the remainder almost uniformly distributed, as a key must be.
    number = int.from_bytes(derive(bytes.fromhex(key)), "big") % (P256_ORDER - 1) + 1
    return ec.derive_private_key(number, ec.SECP256R1())


def _sign(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    authority_key: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
    is_authority: bool = False,
) -> str:
    now = datetime.now(UTC)
    path_length = 0 if is_authority else None
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("quire cluster"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID_SINCE)
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.BasicConstraints(is_authority, path_length), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority_key, SHA256()).public_bytes(Encoding.PEM).decode()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(address))
    except ValueError:
        return x509.DNSName(address)
