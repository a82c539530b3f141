"""Certificates and key pairs in the forms that Flower's commands read."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlgm.files import create_durably

_DAYS = 825
WARNING_DAYS = (60, 14, 1)
"""Days before a certificate's end at which there is a warning."""


def make_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Create the deployment's own certificate authority: `ca.crt` and `ca.key` in `folder`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("fedlgm deployment")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder, "ca", key, certificate)
    return certificate, key


def make_server_certificate(
    folder: Path,
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    hosts: Sequence[str],
) -> None:
    """The SuperLink's certificate for `hosts` (names and addresses): `tls.crt` and `tls.key` in
    `folder`.
    """
    issuer, signer = authority
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name(hosts[0])
    certificate = (
        _builder(name, issuer.subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    _write(folder, "tls", key, certificate)


def ending(file: Path) -> tuple[int, list[int], str]:
    """The end of the newest certificate in a file: days until then, those of `WARNING_DAYS` that
    they do not exceed, and a sentence.

    Raises:
        ValueError: the file holds no certificate.
    """
    certificates = x509.load_pem_x509_certificates(file.read_bytes())
    end = max(certificate.not_valid_after_utc for certificate in certificates)
    days = (end - datetime.now(UTC)).days
    passed = [limit for limit in WARNING_DAYS if days <= limit]
    remedy = "; the server's operator renews it: fedlgm deploy renew DIR" if passed else ""
    when = f"ends on {end:%Y-%m-%d}, in {days} days" if days >= 0 else f"ended on {end:%Y-%m-%d}"
    return days, passed, f"{file} {when}{remedy}"


def make_node_key(path: Path) -> bytes:
    """A SuperNode's key pair, `path` and `path`.pub in OpenSSH's form, whose public key is returned
    in PEM.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    create_durably(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key()
    path.with_name(path.name + ".pub").write_bytes(
        public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    )
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def public_pem(openssh: bytes) -> bytes:
    """A public key of OpenSSH's form in PEM.

    Raises:
        ValueError: the key is not a public key.
    """
    try:
        key = load_ssh_public_key(openssh)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=_DAYS))
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
    create_durably(folder / f"{name}.key", private)
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
