"""Certificates and key pairs in the forms that Flower's commands read."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlgm.errors import RunError
from fedlgm.files import create_durably, explain_failure, write_durably
from fedlgm_nodes.deploy.pages import counted

_DAYS = 825
_AUTHORITY_DAYS = 2 * _DAYS
Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
WARNING_DAYS = (60, 14, 1)
"""Numbers of days before a certificate expires at which the operator is warned."""


def make_authority(folder: Path, number: int = 1) -> Authority:
    """Create a certificate authority for the deployment and write its `ca.crt` and `ca.key` to
    `folder`. If `number` is 2, the files are `ca-2.crt` and `ca-2.key`, and so on.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("fedlgm deployment" + f" {number}" * (number > 1))
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), datetime.now(UTC) + timedelta(days=_AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder, "ca" if number == 1 else f"ca-{number}", key, certificate)
    return certificate, key


def authorities(folder: Path) -> list[Authority]:
    """The authorities in a folder, the newest last.

    Raises:
        RunError: a file cannot be read.
    """
    issuers: list[Authority] = []
    try:
        for file in folder.glob("ca*.crt"):
            key = load_pem_private_key(file.with_suffix(".key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
            issuers.append((certificate, cast(ec.EllipticCurvePrivateKey, key)))
    except (OSError, ValueError) as error:
        raise RunError(
            explain_failure(f"the authority in {folder} cannot be read", error)
        ) from error
    if not issuers:
        raise RunError(f"there is no authority in {folder}: put ca.crt and ca.key there")
    return sorted(issuers, key=lambda authority: authority[0].not_valid_before_utc)


def issuer_of(file: Path, issuers: Sequence[Authority]) -> Authority:
    """The authority that issued a certificate.

    Raises:
        RunError: none of the authorities issued it.
    """
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    for authority in issuers:
        try:
            certificate.verify_directly_issued_by(authority[0])
        except (ValueError, InvalidSignature):
            continue
        return authority
    raise RunError(f"{file} was issued by none of the deployment's authorities")


def is_short(authority: Authority) -> bool:
    """Whether an authority expires before a server's certificate of full length that is issued now
    would expire.
    """
    return authority[0].not_valid_after_utc < datetime.now(UTC) + timedelta(days=_DAYS)


def bundle(issuers: Sequence[x509.Certificate]) -> bytes:
    """The given certificates that have not expired, as the content of one `ca.crt`."""
    valid = [one for one in issuers if one.not_valid_after_utc > datetime.now(UTC)]
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in valid)


def make_server_certificate(folder: Path, authority: Authority, hosts: Sequence[str]) -> None:
    """Create a server's certificate for `hosts` (names and addresses), and write `tls.crt` and
    `tls.key` to `folder`.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    certificate = _issue(authority, _common_name(hosts[0]), key.public_key(), names)
    _write(folder, "tls", key, certificate)


def renewed(file: Path, authority: Authority) -> bytes:
    """Issue a new certificate, in PEM format, for the key and the hosts of the certificate in
    `file`.
    """
    before = x509.load_pem_x509_certificate(file.read_bytes())
    names = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    key = cast(ec.EllipticCurvePublicKey, before.public_key())
    return _issue(authority, before.subject, key, names).public_bytes(Encoding.PEM)


def _issue(
    authority: Authority,
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    names: x509.SubjectAlternativeName,
) -> x509.Certificate:
    """Issue a certificate for a server, which expires no later than the authority."""
    issuer, signer = authority
    end = min(datetime.now(UTC) + timedelta(days=_DAYS), issuer.not_valid_after_utc)
    return (
        _builder(subject, issuer.subject, key, end)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )


def ending(file: Path) -> tuple[int, list[int], str]:
    """Return the number of days until the newest certificate in `file` expires, the values of
    `WARNING_DAYS` that are at least this number, and a sentence for the operator.

    Raises:
        ValueError: the file holds no certificate.
    """
    certificates = x509.load_pem_x509_certificates(file.read_bytes())
    end = max(certificate.not_valid_after_utc for certificate in certificates)
    days = (end - datetime.now(UTC)).days
    passed = [limit for limit in WARNING_DAYS if days <= limit]
    remedy = "; the server's operator renews it: fedlgm deploy renew DIR" if passed else ""
    when = (
        f"ends on {end:%Y-%m-%d}, in {counted(days, 'day')}"
        if days >= 0
        else f"ended on {end:%Y-%m-%d}"
    )
    return days, passed, f"{file} {when}{remedy}"


def make_node_key(path: Path) -> bytes:
    """Create a SuperNode's key pair in OpenSSH's format, in the files `path` and `path`.pub. Return
    the public key in PEM format.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    create_durably(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key()
    path.with_name(path.name + ".pub").write_bytes(
        public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    )
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def public_pem(openssh: bytes) -> bytes:
    """Convert a public key from OpenSSH's format to PEM.

    Raises:
        ValueError: the bytes are not a public key.
    """
    try:
        key = load_ssh_public_key(openssh)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(end)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _write(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    """Write `name`.key, which only its owner can read, and `name`.crt."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # the key comes first: a key without a certificate shows that a call was killed
    write_durably(folder / f"{name}.key", private)
    write_durably(folder / f"{name}.crt", certificate.public_bytes(Encoding.PEM), 0o644)
