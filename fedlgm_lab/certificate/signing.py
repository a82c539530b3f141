"""Ed25519 keys in PEM files, and the signatures of operators, witnesses and auditors."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from fedlgm.errors import ConfigError
from fedlgm.files import PUBLIC, create_durably, explain_failure
from fedlgm.privacy.signed import anchor_text
from fedlgm_lab.certificate.beacon import beacon_text

_HEAD = re.compile(r"([0-9]+|commitment):([0-9a-f]{64})")


def create_key(path: Path) -> Path:
    """Write a new private key (mode 0600), and the public key beside it.

    Args:
        path: the private key's file, such as "operator.pem".

    Returns:
        The file of the public key, "operator.pub".

    Raises:
        ConfigError: one of the files exists.
    """
    key, public = Ed25519PrivateKey.generate(), path.with_suffix(".pub")
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    shown = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        create_durably(path, secret)
        create_durably(public, shown, PUBLIC)
    except FileExistsError as error:
        raise ConfigError(f"{path} or {public} exists: choose another name") from error
    return public


def load_key(path: Path) -> Ed25519PrivateKey:
    """Load the private key in a PEM file.

    Raises:
        ConfigError: the file holds no Ed25519 private key, or cannot be read.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        what = f"--key: {path} is not a private key in PEM"
        raise ConfigError(explain_failure(what, error, "--new-key makes one")) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"--key: {path} is not an Ed25519 key; --new-key makes one")
    return key


def public_hex(key: Ed25519PrivateKey) -> str:
    """Return the public key of a private key, in hexadecimal."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def sign_head(text: str, key: Ed25519PrivateKey) -> dict[str, Any]:
    """Make a witness's anchor from "ROUND:HEAD", or an auditor's beacon from "commitment:HASH".

    A key gives the same beacon each time for the same commitment, so an operator cannot ask for
    several beacons and choose one of them. The beacon is derived from an Ed25519 signature, which
    is deterministic and which nobody can predict without the auditor's key.

    Raises:
        ConfigError: the text has neither form.

    Example:
        >>> sorted(sign_head("5:" + "ab" * 32, Ed25519PrivateKey.generate()))
        ['by', 'head', 'round', 'signature']
    """
    match = _HEAD.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"the text must be ROUND:HASH or commitment:HASH, with 64 digits in HASH; got {text!r}"
        )
    kind, value = match.groups()
    if kind == "commitment":
        seed = key.sign(f"fedlgm beacon seed v1\n{value}\n".encode())
        beacon = hashlib.sha256(seed).hexdigest()
        signed = beacon_text(value, beacon)
        answer: dict[str, Any] = {"beacon": beacon}
    else:
        signed, answer = anchor_text(int(kind), value), {"round": int(kind), "head": value}
    return answer | {"by": public_hex(key), "signature": key.sign(signed).hex()}


def read_anchors(path: Path) -> list[dict[str, Any]]:
    """Read the anchors in a file with one JSON object per line.

    Raises:
        ConfigError: a line is not an anchor, or the file cannot be read.
    """
    anchors = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            raw = json.loads(line)
            anchors.append({name: raw[name] for name in ("round", "head", "by", "signature")})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            explain_failure(f"--anchor: {path} does not hold anchors", error)
        ) from error
    return anchors
