"""Checks 1 and 2: the signed envelope (DSSE), and canonical JSON without duplicate keys."""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any, NoReturn

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)

from fedlgm.privacy.signed import PAYLOAD_TYPE, signed_bytes
from fedlgm_lab.certificate.verifier.evidence import is_signed

PREDICATE_TYPE = "urn:fedlgm:privacy-certificate:v1"


class Refused(Exception):
    """A check does not hold (exit status 2).

    Example:
        >>> str(Refused(4, "round 2 is missing"))
        'check 4: round 2 is missing'
    """

    def __init__(self, check: int, problem: str) -> None:
        super().__init__(f"check {check}: {problem}")
        self.check = check


class NotCheckable(Exception):
    """The certificate cannot be checked here (exit status 3)."""


def parse(data: bytes, check: int, what: str) -> Any:
    """The value of a JSON text without duplicate keys, NaN, infinity or numbers beyond a double.

    Raises:
        Refused: the text is another one.

    Example:
        >>> parse(b'{"a": 1}', 2, "an example")
        {'a': 1}
        >>> parse(b'{"a": 1, "a": 2}', 2, "an example")
        Traceback (most recent call last):
            ...
        fedlgm_lab.certificate.verifier.envelope.Refused: check 2: an example has the key 'a' twice
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, part in pairs:
            if key in value:
                raise Refused(check, f"{what} has the key {key!r} twice")
            value[key] = part
        return value

    def refuse(text: str) -> NoReturn:
        raise Refused(check, f"{what} has the number {text}, which no double holds")

    def real(text: str) -> float:
        return refuse(text) if abs(float(text)) == float("inf") else float(text)

    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse, parse_float=real
        )
    except (ValueError, RecursionError) as error:
        raise Refused(check, f"{what} is not JSON ({error})") from None


def canonical(data: bytes, check: int, what: str) -> Any:
    """The value of a text in canonical JSON (RFC 8785).

    Raises:
        Refused: the text has another order of keys, white space or another form of numbers.
    """
    value = parse(data, check, what)
    try:
        same = rfc8785.dumps(value) == data
    except (rfc8785.CanonicalizationError, UnicodeError, RecursionError):
        same = False
    if not same:
        raise Refused(check, f"{what} is not canonical JSON (RFC 8785), so it was edited")
    return value


def public_key(path: Path) -> str:
    """The Ed25519 public key in a PEM file, in hexadecimal; a name of 64 hexadecimal digits is the
    key itself, as in the `public.toml` of a node.

    Raises:
        NotCheckable: the file holds none.
    """
    if re.fullmatch("[0-9a-f]{64}", str(path)):
        return str(path)
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise NotCheckable(f"{path} is not a public key in PEM ({error})") from None
    if not isinstance(key, Ed25519PublicKey):
        raise NotCheckable(f"{path} is not an Ed25519 key")
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def open_envelope(data: bytes, key: str | None) -> tuple[bytes, str]:
    """The signed payload and its signer's public key.

    Args:
        data: content of the certificate's file.
        key: public key that must have signed; None accepts any, which the caller has to say.

    Raises:
        Refused: it is not an envelope, or the signature is of another key.
        NotCheckable: the payload has another type.
    """
    envelope = canonical(data.removesuffix(b"\n"), 1, "the envelope")
    if not isinstance(envelope, dict) or set(envelope) != {"payload", "payloadType", "signatures"}:
        raise Refused(1, "the envelope must have payload, payloadType and signatures, alone")
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise NotCheckable(f"the payload's type is not {PAYLOAD_TYPE}")
    signatures = envelope["signatures"]
    if not (isinstance(signatures, list) and len(signatures) == 1):
        raise Refused(1, "the envelope must have one signature")
    (signature,) = signatures
    if not (isinstance(signature, dict) and set(signature) == {"keyid", "sig"}):
        raise Refused(1, "a signature must have keyid and sig, alone")
    payload, sig = _decode(envelope["payload"]), _decode(signature["sig"])
    signer = signature["keyid"]
    if key is not None and signer != key:
        raise Refused(1, f"the certificate is signed by {signer}, not by the named key {key}")
    if not is_signed(signer, sig.hex(), signed_bytes(payload)):
        raise Refused(1, f"the signature is not that of {signer} on this payload")
    return payload, signer


def _decode(text: Any) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        data = b""
    if not data or base64.b64encode(data).decode() != text:
        raise Refused(1, "the envelope has a field that is not base64")
    return data
