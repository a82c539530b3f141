"""The mapping of a deployment's nodes to clients, which the server's operator records."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedlgm.errors import ConfigError
from fedlgm.files import read_toml
from fedlgm.wording import describe_problem
from fedlgm_nodes.protocol.messages import Name

_HEX = r"^[0-9a-f]{64}$"


class EnrolledNode(BaseModel):
    """One [[node]] entry of an enrolment file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    client: int = Field(ge=0)
    name: Name
    flower_key: str = Field(pattern=_HEX)
    service_key: str = Field(pattern=_HEX)


class Enrolment(BaseModel):
    """The mapping of registered nodes to clients. The server's operator decides it, never a node.

    Attributes:
        node: one entry per client, each with the digest of its SuperNode's public key (see
            `key_digest`) and the public key of its release service. A removed node leaves a gap in
            the numbers of clients, because every other node's policy states the number of that
            node.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    node: list[EnrolledNode] = Field(min_length=1)

    @model_validator(mode="after")
    def _each_once(self) -> Enrolment:
        for name in ("client", "name", "flower_key", "service_key"):
            values = [getattr(node, name) for node in self.node]
            if len(set(values)) != len(values):
                raise ValueError(f"two nodes have the same {name}")
        return self

    @classmethod
    def load(cls, path: Path) -> Enrolment:
        """Read an enrolment file.

        Raises:
            ConfigError: the file is missing or invalid; the message gives the reason.
        """
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            raise ConfigError(f"{path}: {describe_problem(error.errors()[0])}") from error

    @property
    def clients(self) -> list[int]:
        """The clients' numbers, ascending."""
        return sorted(node.client for node in self.node)

    def __len__(self) -> int:
        return len(self.node)

    def __getitem__(self, client: int) -> EnrolledNode:
        return next(node for node in self.node if node.client == client)


def key_digest(pem: bytes) -> str:
    """SHA-256 of a public key, as hexadecimal digits, independent of the formatting of its PEM
    text.

    Raises:
        ValueError: the text is not a public key in PEM.
    """
    try:
        key = serialization.load_pem_public_key(pem)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()
