"""Checks 1 and 2 and their helpers: the signed envelope (DSSE), canonical JSON, and values without
unknown fields.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from fedlgm.files import explain_failure
from fedlgm.privacy.signed import PAYLOAD_TYPE, signed_bytes


class Refused(Exception):
    """A check does not hold (exit status 2).

    Example:
        >>> str(Refused(4, "round 2 is missing"))
        'check 4: round 2 is missing'
    """

    def __init__(self, check: int, problem: str) -> None:
        super().__init__(f"check {check}: {problem}")


class NotCheckable(Exception):
    """The certificate cannot be checked here (exit status 3)."""


def must(check: int, holds: Any, problem: str) -> None:
    """Raise `Refused` if a condition of a check does not hold."""
    if not holds:
        raise Refused(check, problem)


class Maybe(NamedTuple):
    """The form of a value that has the form `form` or is null."""

    form: Any


def require(value: Any, form: Any, where: str, check: int = 2) -> None:
    """Raise `Refused` if the fields of a value, or their types, differ from a form.

    Args:
        value: the value.
        form: a function that accepts a value; a mapping of forms, in which "*" stands for any name
            and "name?" may be missing; a list of one form, for lists of any length; or a tuple of
            forms, for lists of this length.
        where: name of the value, for messages.
        check: number of the check, for messages.

    Raises:
        Refused: the message names the field.

    Example:
        >>> require({"a": [1]}, {"a": [is_count], "b?": is_text}, "x")
        >>> require({"c": 1}, {"c?": is_text}, "x")
        Traceback (most recent call last):
            ...
        fedlgm_lab.certificate.verifier.envelope.Refused: check 2: x.c has an impossible value, '1'
    """
    if isinstance(form, Maybe):
        if value is not None:
            require(value, form.form, where, check)
    elif isinstance(form, dict):
        must(check, isinstance(value, dict), f"{where} must be an object")
        forms = dict.fromkeys(value, form["*"]) if "*" in form else form
        known = {name.removesuffix("?"): inner for name, inner in forms.items()}
        for name in sorted(set(value) ^ set(known)):
            if name in value or name in form:
                word = "unknown" if name in value else "missing"
                raise Refused(check, f"{where} has the field {name!r}, which is {word}")
        for name, part in value.items():
            require(part, known[name], f"{where}.{name}", check)
    elif isinstance(form, list | tuple):
        must(check, isinstance(value, list), f"{where} must be a list")
        inner = form if isinstance(form, tuple) else form * len(value)
        must(check, len(value) == len(inner), f"{where} must have {len(inner)} values")
        for number, part in enumerate(value):
            require(part, inner[number], f"{where}[{number}]", check)
    else:
        must(check, form(value), f"{where} has an impossible value, {str(value)[:60]!r}")


def is_text(value: Any) -> bool:
    """Tell whether a value is a text."""
    return isinstance(value, str)


def is_hash(value: Any) -> bool:
    """Tell whether a value is a text of 64 hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def is_count(value: Any) -> bool:
    """Tell whether a value is a whole number of at least 0."""
    return type(value) is int and value >= 0


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number of at least 0."""
    return type(value) in (int, float) and 0 <= value < float("inf")


_ENVELOPE = {
    **{"payload": is_text, "payloadType": is_text},
    "signatures": [{"keyid": is_text, "sig": is_text}],
}


def write_json(value: Any) -> bytes:
    """Write the text of a plan or event in Python's JSON, without NaN and infinity."""
    return json.dumps(value, allow_nan=False).encode()


def read_json(
    data: bytes, check: int, what: str, write: Callable[[Any], bytes] = rfc8785.dumps
) -> Any:
    """Read the value of a JSON text, which must equal the text that `write` makes of this value; by
    default, the text must be canonical by RFC 8785.

    Raises:
        Refused: the text has another order of keys, white space, a duplicate key, or a number that
            is not in the form of a double.

    Example:
        >>> read_json(b'{"a":1}', 2, "an example")
        {'a': 1}
        >>> read_json(b'{"a":1,"a":2}', 2, "an example")
        Traceback (most recent call last):
            ...
        fedlgm_lab.certificate.verifier.envelope.Refused: check 2: an example is not canonical JSON
    """
    try:
        value = json.loads(data)
        if write(value) == data:
            return value
    except (ValueError, RecursionError):  # the text is not JSON, or its value has no canonical form
        pass
    raise Refused(check, f"{what} is not canonical JSON")


def public_key(path: Path) -> str:
    """Read the Ed25519 public key in a PEM file, in hexadecimal. If the path is 64 hexadecimal
    digits, it is itself the key, as in the `public.toml` of a node.

    Raises:
        NotCheckable: the file cannot be read, or holds no Ed25519 public key in PEM.
    """
    if is_hash(str(path)):
        return str(path)
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise NotCheckable(explain_failure(f"{path} is not a public key in PEM", error)) from None
    if not isinstance(key, Ed25519PublicKey):
        raise NotCheckable(f"{path} is not an Ed25519 key")
    return key.public_bytes_raw().hex()


def is_signed(by: str, signature: str, text: bytes) -> bool:
    """Tell whether an Ed25519 signature of `text` holds; key and signature are in hexadecimal."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(by)).verify(bytes.fromhex(signature), text)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def open_envelope(data: bytes, key: str | None) -> tuple[bytes, str]:
    """Return the payload of a signed envelope and the signer's public key.

    Args:
        data: content of the certificate's file.
        key: public key of the required signer. None accepts any signer; the caller must then report
            this.

    Raises:
        Refused: the envelope is malformed, or its signature does not hold.
        NotCheckable: the payload is of another type.
    """
    envelope = read_json(data.removesuffix(b"\n"), 1, "the envelope")
    require(envelope, _ENVELOPE, "the envelope", 1)
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise NotCheckable(f"the payload's type is not {PAYLOAD_TYPE}")
    must(1, len(envelope["signatures"]) == 1, "the envelope must have one signature")
    payload = _decode(envelope["payload"])
    signer, sig = (envelope["signatures"][0][name] for name in ("keyid", "sig"))
    by = f"the certificate is signed by {signer}, not by the named key {key}"
    must(1, key in (None, signer), by)
    right = is_signed(signer, _decode(sig).hex(), signed_bytes(payload))
    must(1, right, f"the signature is not that of {signer} on this payload")
    return payload, signer


def _decode(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        data = b""
    same = base64.b64encode(data).decode() == text
    must(1, data and same, "the envelope has a field that is not base64")
    return data
