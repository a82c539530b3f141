"""Operator's rules for secure aggregation on a node; no message can change them."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from clients.node.policy import LISTED
from fedlgm.node_protocol import public_key


class Distributed(BaseModel):
    """The peers of a node in secure sums, and its least conditions for them.

    Example:
        >>> Distributed(min_cohort=5, max_colluders=1, peers=("aa" * 32, "", "bb" * 32)).services.keys()
        dict_keys([0, 2])
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min_cohort: int = Field(ge=2)  # nodes, at least, among which a node's vector is hidden
    max_colluders: int = Field(ge=0)  # of them that may collude with the server; the others' noise has to suffice
    # Ed25519 keys of all clients' services, by client number; "": none
    peers: Annotated[tuple[str, ...], Field(min_length=2), LISTED]

    @field_validator("peers")
    @classmethod
    def _keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for client, key in enumerate(value):
            try:
                if key:
                    public_key(key)
            except ValueError:
                raise ValueError(f"the key of client {client} must have 64 hexadecimal digits, or be empty") from None
        return value

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.min_cohort <= self.max_colluders + 1:
            raise ValueError(
                f"min_cohort = {self.min_cohort} must exceed max_colluders + 1 = {self.max_colluders + 1}: a node's "
                "vector would be hidden among those of colluders alone"
            )
        return self

    @property
    def services(self) -> dict[int, str]:
        """Client -> public key of its service."""
        return {client: key for client, key in enumerate(self.peers) if key}
