"""A question to a node's service from an untrusted sender, and the answer to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.secagg.steps import AHEAD


class Ask(BaseModel):
    """The header of a question from an untrusted sender."""

    model_config = ConfigDict(extra="forbid", strict=True)
    protocol: int
    ask: str
    nonce: str = Field(default="", pattern="^[0-9a-f]{0,64}$")
    run: str = Field(default="", max_length=200)
    round: int = Field(default=0, ge=0, lt=2**31)
    client: int = Field(default=-1, ge=-1, lt=2**31)
    plan: str = ""
    work: dict[str, Any] = {}
    expect: dict[str, Any] | None = None
    signature: str = Field(default="", pattern="^[0-9a-f]{0,128}$")
    # the model's digest, in steps that do not bring the model
    model: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    given: dict[str, Any] = {}  # the server's values for a step of a secure sum
    ahead: dict[str, Any] | None = None  # what differs in a step of the next round, see `AHEAD`

    @property
    def trains(self) -> bool:
        """Whether the node trains for the answer, so that its numbers and its time depend on the
        data.
        """
        return self.ask in ("release", "mask")

    def further(self) -> Ask:
        """The question of the next round that `ahead` describes.

        Raises:
            Refusal: the question is malformed.
        """
        changed = {**(self.ahead or {}), "ask": AHEAD[self.ask], "ahead": None}
        try:
            return Ask.model_validate(self.model_dump() | changed)
        except ValidationError as error:
            raise Refusal("malformed", f"ahead: {error.errors()[0]['msg']}") from error


@dataclass
class Answer:
    """An answer, with a header and the released numbers, if there are any."""

    header: dict[str, Any]
    body: bytes = b""
