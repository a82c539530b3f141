"""The policy of a node's operator, a TOML file that no message can change.

All checks use the numbers with which a plan will be executed. Labels in a plan or a run do not
affect them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import OWN, is_reference
from fedlgm.files import read_toml
from fedlgm.planning.clipping import LEAST_CLIP
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.trust import hides_answers
from fedlgm.privacy.guarantee import Trust
from fedlgm.wire import printable
from fedlgm.wording import alternatives, describe_problem
from fedlgm_nodes.protocol.messages import PROTOCOL, Name, public_key

_ROUNDING = 1 + 1e-6
_LARGEST_SCALE = 2.0**100  # largest scale of noise; with a larger scale, float64 sums overflow
MOST_STEPS = 10_000  # example-level steps of one release
MIB = 1 << 20
LIVE = ("privacy", "allow", "ask", "limits")
"""Sections of a policy that can be changed while the service runs."""
LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Validator that converts lists, which TOML has, to the tuples of strict sections."""


class Refusal(Exception):
    """The reason why a node does not answer a question.

    Attributes:
        code: short name of the kind of refusal, for programs.
        why: the reason in words, independent of the node's data. It is written to the node's log,
            and an untrusted sender may have chosen some of its words (see `printable`).
        about: client of another node that caused the refusal; None if there is none.
    """

    def __init__(self, code: str, why: str, about: int | None = None) -> None:
        self.code, self.why, self.about = code, printable(why, 1000), about
        super().__init__(f"{code}: {self.why}")

    @property
    def header(self) -> dict[str, Any]:
        """The header of the answer that states this refusal."""
        about = {} if self.about is None else {"about": self.about}
        return {"ok": False, "protocol": PROTOCOL, "code": self.code, "why": self.why} | about


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Node(_Section):
    """[node]: this node's name and its client number in the federation."""

    name: Name
    client: int = Field(ge=0, lt=2**31)
    population: int = Field(ge=1, le=2**31)

    @model_validator(mode="after")
    def _client_exists(self) -> Self:
        if self.client >= self.population:
            raise ValueError(f"client = {self.client} must be below population = {self.population}")
        return self


class People(_Section):
    """[data] people: how this node knows whose rows it uses (see `fedlgm_nodes.service.people`)."""

    column: str = Field(min_length=1)  # column of pseudonyms
    elsewhere: str = Field(min_length=1)  # file of the pseudonyms whose data other nodes use


class Data(_Section):
    """[data]: where the node's examples are, and their form (see `fedlgm_nodes.service.data`)."""

    name: str = Field(min_length=1, max_length=200)
    kind: Literal["numpy", "images", "idx", "csv", "parquet", "loader"]
    path: str = ""
    labels: str = ""  # for numpy and idx a separate file, for csv and parquet a column
    features: Annotated[
        tuple[str, ...], LISTED
    ] = ()  # csv, parquet: columns; by default all but the labels
    standardise: dict[
        str, Annotated[tuple[float, float], LISTED]
    ] = {}  # csv, parquet: public mean and deviation of columns
    loader: str = Field(default="", pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")
    options: dict[str, Any] = {}  # options of the loader
    shape: Annotated[tuple[int, ...], Field(min_length=1), LISTED]  # shape of one input
    classes: int = Field(ge=1)  # number of classes, or of numbers per example
    class_names: Annotated[
        tuple[str, ...], LISTED
    ] = ()  # images: folders; csv, parquet: names in the label column; in the order of their numbers
    people: People | None = None  # only for csv and parquet: whose rows this node uses

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if any(size < 1 for size in self.shape):
            raise ValueError(f"shape must hold positive sizes, got {list(self.shape)}")
        if self.kind == "loader" and not self.loader:
            raise ValueError("kind = 'loader' needs loader = 'package.module:function'")
        if self.kind != "loader" and not self.path:
            raise ValueError(f"kind = {self.kind!r} needs path")
        if (self.kind == "idx" or self.is_table) and not self.labels:
            raise ValueError(f"kind = {self.kind!r} needs labels (idx: a file; else: a column)")
        if (self.kind == "images" or self.class_names) and len(self.class_names) != self.classes:
            raise ValueError(
                f"kind = {self.kind!r} with classes = {self.classes} needs class_names, one per "
                "class (images: names of folders)"
            )
        if self.standardise and not self.is_table:
            raise ValueError("standardise is for columns: kind = 'csv' or 'parquet'")
        if self.people is not None:
            if not self.is_table:
                raise ValueError("people is for columns: kind = 'csv' or 'parquet'")
            if self.people.column in (self.labels, *self.features):
                raise ValueError(
                    f"people.column = {self.people.column!r} is an input or the label of the model"
                )
        return self

    @property
    def is_table(self) -> bool:
        """Whether the examples are rows of named columns."""
        return self.kind in ("csv", "parquet")


class Privacy(_Section):
    """[privacy]: the budget for the life of the data set, over all runs, servers and plans, and
    conditions for single plans.
    """

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    unit: Literal["client", "example"] = (
        "client"  # what the budget protects: all of the node's data, or one example
    )
    trust: Annotated[tuple[Trust, ...], LISTED] = ("local",)
    min_noise_multiplier: float = Field(default=0.0, ge=0)
    largest_clip: float = Field(default=1.0, gt=0, le=1e6)
    # whether gradients of example-level steps are summed in float64 even if the server does not ask
    # for it
    exact_sums: bool = False
    # largest number of nodes at which one person has rows; None if it is not known
    overlap: int | None = Field(default=None, ge=1, le=100)

    @property
    def nodes(self) -> int:
        """Largest number of nodes at which one person has rows; 1 if it is not known."""
        return self.overlap or 1

    @property
    def units(self) -> str:
        """Plural name of the protected unit, which is people if one person may have rows at several
        nodes.
        """
        return "people" if self.nodes > 1 else f"{self.unit}s"

    @model_validator(mode="after")
    def _some_trust(self) -> Self:
        if not self.trust:
            raise ValueError("trust must name 'local', 'central' or 'distributed'")
        if self.nodes > 1 and hides_answers(self.trust):
            raise ValueError(
                "overlap is for trust 'local' and 'central': the joint cost of a person at several "
                "nodes is not proven for noise in shares"
            )
        return self


class Allow(_Section):
    """[allow]: names that are installed on the node and that a server may request, and the largest
    work.
    """

    mechanisms: Annotated[tuple[str, ...], LISTED]
    models: Annotated[tuple[str, ...], LISTED]
    tasks: Annotated[tuple[str, ...], LISTED] = ("classification",)
    # mechanism -> option -> values that a server may request
    options: dict[str, dict[str, list[Any]]] = {}
    weights: dict[
        str, str
    ] = {}  # initial weights of models: SHA-256 of a safetensors file -> its path on this node
    largest_model: int = Field(default=20_000_000, ge=1)  # parameters
    most_epochs: int = Field(default=20, ge=1)

    def check_names(self) -> None:
        """Refuse names that are not installed. Unlike reading a policy, this loads torch.

        Raises:
            ConfigError: a name is unknown.
        """
        from fedlgm import mechanisms
        from fedlgm.training import models, tasks

        for key, names, choices in (
            ("mechanisms", self.mechanisms, mechanisms.names(None)),
            ("models", self.models, models.names()),
            ("tasks", self.tasks, tasks.names()),
        ):
            for name in names:
                if name not in choices and not is_reference(name):
                    near = alternatives(name, choices, OWN)
                    raise ConfigError(f"policy.toml: allow.{key}: unknown name {name!r}; {near}")

    @model_validator(mode="after")
    def _options_of_listed_mechanisms(self) -> Self:
        for name in self.options:
            if name not in self.mechanisms:
                raise ValueError(f"options names {name!r}, which mechanisms does not list")
        return self

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, value: dict[str, str]) -> dict[str, str]:
        for digest, file in value.items():
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(
                    "must map a file's SHA-256 of 64 hexadecimal digits to its path, got "
                    f"{digest!r}"
                )
            if not Path(file).is_absolute():
                raise ValueError(f"must hold absolute paths, got {file!r}")
        return value

    def weights_file(self, digest: object) -> Path:
        """The node's file with this SHA-256.

        Raises:
            Refusal: the policy does not list the hash, or the file is missing or has changed. The
                refusal does not state the path.
        """
        if not isinstance(digest, str) or digest not in self.weights:
            raise Refusal(
                "work",
                f"model.weights: no file with SHA-256 {str(digest)[:64]!r} is allowed on this node",
            )
        from fedlgm.training.models.weights import digest_of_file

        file = Path(self.weights[digest])
        try:
            actual = digest_of_file(file)
        except ConfigError:
            actual = ""
        if actual != digest:
            raise Refusal(
                "work",
                f"model.weights: the node's file for SHA-256 {digest} is missing or has changed",
            )
        return file

    def check_options(self, mechanism: str, options: Mapping[str, Any]) -> None:
        """Refuse options of a mechanism that this node's operator does not allow.

        No option of a bundled mechanism makes a release cost more than its plan says, so all values
        may be requested unless the policy lists options of the mechanism. This is not known of the
        operator's own mechanisms, so only the listed values of their options, and their defaults,
        may be requested.

        Raises:
            Refusal: a requested value is neither the option's default nor listed, and the policy
                lists options of the mechanism or the mechanism is not bundled.
        """
        from fedlgm import mechanisms

        if mechanism not in self.options and not mechanisms.is_own(mechanism):
            return
        listed = self.options.get(mechanism, {})
        for option, value in options.items():
            allowed = listed.get(option, [])
            if value not in allowed and not _is_default(mechanism, option, value):
                choices = ", ".join(map(repr, allowed)) if allowed else "only its default"
                raise Refusal(
                    "work", f"mechanism: {option[:80]} = {value!r:.200}; allowed: {choices}"[:400]
                )


def _is_default(mechanism: str, option: str, value: object) -> bool:
    """Whether a mechanism's option has this value by default."""
    from fedlgm import mechanisms

    try:
        instance = mechanisms.get(mechanism)
    except ConfigError:  # another of its options has no default
        return False
    default = getattr(instance, option) if option in mechanisms.options(mechanism) else ...
    return bool((list(default) if isinstance(default, tuple) else default) == value)


class Ask(_Section):
    """[ask]: who may ask, and how often."""

    server_key: str = ""  # Ed25519 public key; questions that it has not signed are refused
    next_server_key: str = ""  # new key of the same server, while it replaces its key
    runs: Annotated[tuple[str, ...], LISTED] = ()  # labels of runs; empty if any run may ask
    releases: int = Field(default=1000, ge=1)
    releases_per_run: int = Field(default=1000, ge=1)
    releases_per_day: int = Field(default=1000, ge=1)
    approval: Literal["policy", "operator"] = "policy"
    # smallest distance in rounds between two rounds of a run in which the node takes part
    min_separation: int = Field(default=1, ge=1)

    @property
    def server_keys(self) -> list[str]:
        """The server's public keys. A question must be signed by one of these keys. If the list is
        empty, any sender may ask.
        """
        return [self.server_key, *filter(None, (self.next_server_key,))] if self.server_key else []

    @field_validator("server_key", "next_server_key")
    @classmethod
    def _key(cls, value: str) -> str:
        if value:
            try:
                public_key(value)
            except ValueError:
                raise ValueError(
                    "must be an Ed25519 public key of 64 hexadecimal digits, or empty"
                ) from None
        return value


class Limits(_Section):
    """[limits]: limits on sizes and times."""

    message_mib: int = Field(default=96, ge=1, le=1 << 13)
    receive_seconds: float = Field(default=60.0, gt=0)
    queue_seconds: float = Field(default=120.0, gt=0)
    release_seconds: float = Field(default=600.0, gt=0)
    connections: int = Field(default=8, ge=1, le=1024)
    reply_every_seconds: float = Field(default=0.5, ge=0)
    threads: int = Field(default=1, ge=1, le=1024)
    # seconds without a question after which the training process ends, which frees its memory
    training_idle_seconds: float = Field(default=300.0, gt=0)
    kept_replies: int = Field(default=4, ge=0)


class Socket(_Section):
    """[socket]: users who may connect to the socket, if the permissions of its folder also let
    them.
    """

    group: str = ""
    uids: Annotated[tuple[int, ...], LISTED] = ()


class Distributed(_Section):
    """[distributed]: the other nodes with which a node takes part in secure sums, and its
    conditions for these sums.

    Example:
        >>> Distributed(min_cohort=5, max_colluders=1, peers=("aa" * 32, "", "bb" * 32)).services.keys()
        dict_keys([0, 2])
    """

    min_cohort: int = Field(ge=2)  # least number of nodes among which a node's vector is hidden
    # number of nodes of the cohort that may collude with the server; the noise of the other nodes
    # must suffice
    max_colluders: int = Field(ge=0)
    # public Ed25519 keys of all clients' services, by client number; "" if there is no such client
    peers: Annotated[tuple[str, ...], Field(min_length=2), LISTED]

    @field_validator("peers")
    @classmethod
    def _keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        owners = dict[str, int]()
        for client, key in enumerate(value):
            if not key:
                continue
            try:
                if public_key(key).public_bytes_raw().hex() != key:
                    raise ValueError
            except ValueError:
                raise ValueError(
                    f"the key of client {client} must have 64 hexadecimal digits in lower case, or "
                    "be empty"
                ) from None
            if (
                other := owners.setdefault(key, client)
            ) != client:  # one service would count as two nodes and hold two shares
                raise ValueError(f"clients {other} and {client} have the same key")
        return value

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.min_cohort <= self.max_colluders + 1:
            raise ValueError(
                f"min_cohort = {self.min_cohort} must exceed max_colluders + 1 = "
                f"{self.max_colluders + 1}: otherwise a node's vector could be hidden only among "
                "vectors of colluders"
            )
        return self

    @property
    def services(self) -> dict[int, str]:
        """Client -> public key of its service."""
        return {client: key for client, key in enumerate(self.peers) if key}


class Policy(_Section):
    """A validated policy."""

    node: Node
    data: Data
    privacy: Privacy
    allow: Allow
    ask: Ask = Ask()
    limits: Limits = Limits()
    socket: Socket = Socket()
    distributed: Distributed | None = None

    @model_validator(mode="after")
    def _known_peers(self) -> Self:
        if hides_answers(self.privacy.trust) and self.distributed is None:
            raise ValueError(
                "privacy.trust names 'distributed', which needs a section [distributed] with its "
                "peers"
            )
        return self

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read a policy file.

        Raises:
            ConfigError: the file is missing or not TOML, or a key is unknown or has a wrong type or
                value. The message names the key and the reason.
        """
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            said = [
                describe_problem(item, cls._keys_beside(item["loc"])) for item in error.errors()
            ]
            raise ConfigError("\n".join(f"{path}: {line}" for line in said)) from error

    @classmethod
    def _keys_beside(cls, place: tuple[int | str, ...]) -> list[str]:
        """Known keys of the section that holds the key at `place`, or of the file if the key is in
        no section.
        """
        field = cls.model_fields.get(str(place[0])) if len(place) == 2 else None
        kind = cls if field is None else (get_args(field.annotation) or (field.annotation,))[0]
        return list(kind.model_fields)

    def check_reload(self, values: Mapping[str, Any]) -> None:
        """Refuse to reload this policy if it changes a key that cannot be changed while the service
        runs.

        Args:
            values: values of the policy that the service enforces, as in JSON.

        Raises:
            ConfigError: one of these keys has changed; the message names it.
        """
        own = self.model_dump(mode="json")
        fixed = [key for key in own if key not in LIVE and own[key] != values[key]]
        for key in ("unit", "trust", "overlap"):
            if own["privacy"][key] != values["privacy"][key]:
                fixed.append(f"privacy.{key}")
        if fixed:
            raise ConfigError(
                f"policy.toml: {', '.join(fixed)} changed, which takes a restart of the service"
            )

    def admit(self, plan: ReleasePlan) -> None:
        """Refuse a plan that this node would not execute whatever budget it has left.

        Raises:
            Refusal: the plan's trust model is not allowed, its noise is too small, its bounds are
                too large, or the node cannot execute it soundly.
        """
        privacy = self.privacy
        if plan.facts.trust not in privacy.trust:
            raise Refusal(
                "privacy",
                f"a plan for {plan.facts.trust} trust; allowed: {', '.join(privacy.trust)}",
            )
        if plan.size == 0:
            raise Refusal("plan", "a plan that releases nothing")
        distributed, facts = self.distributed, plan.facts
        if facts.sampling.of is not None:
            shared = f"{facts.sampling.of}s with several clients each"
            raise Refusal("plan", f"a plan for {shared}; this node bounds only its own data")
        unmet = (
            ""
            if distributed is None
            else facts.noised_by.unmet_condition(
                facts, distributed.min_cohort, distributed.max_colluders
            )
        )
        if unmet:
            raise Refusal("privacy", unmet)
        if not plan.protected:
            raise Refusal("privacy", "a plan without a guarantee")
        self._admit_people(facts.overlap)
        names = [noisy.query.name for noisy in plan.queries]
        # each query may be requested only once, because every query is computed in every step
        if len(set(names)) < len(names):
            raise Refusal("plan", "a duplicate auxiliary query")
        if plan.bounded_by == "trainer":
            self._admit_steps(plan)
        noise, apart = plan.facts.noise, plan.facts.sampling.separation or 1
        if noise is not None and (noise.bands is None or noise.bands > apart):
            raise Refusal(
                "privacy",
                "noise correlated over more rounds than lie between two participations of this "
                "node, which charges each participation separately",
            )
        clip = plan.clip[plan.released]
        sigma = np.array([part.sigma for part in plan.parts])
        if (clip > privacy.largest_clip * _ROUNDING).any():
            raise Refusal(
                "privacy", f"a bound of {clip.max():g}; at most {privacy.largest_clip:g} is allowed"
            )
        if ((clip > 0) & (clip < LEAST_CLIP)).any():
            raise Refusal(
                "privacy",
                f"a bound of {clip[clip > 0].min():g}; norms in float32 are not accurate enough",
            )
        if not ((sigma > 0) & (sigma <= _LARGEST_SCALE)).all():
            raise Refusal(
                "privacy", "a released part without noise, or with more than can be represented"
            )
        multiplier = plan.effective_multiplier
        if (
            not math.isfinite(multiplier)
            or multiplier < privacy.min_noise_multiplier
            or multiplier <= 0
        ):
            raise Refusal(
                "privacy",
                f"a noise multiplier of {multiplier:g}; at least {privacy.min_noise_multiplier:g} "
                "is needed",
            )

    def _admit_people(self, assumed: int) -> None:
        """Refuse a run whose epsilon is stated for people with rows at several nodes, if this
        node's people may have rows at more nodes than the run assumes, or the policy does not state
        this number.
        """
        overlap = self.privacy.overlap
        if assumed > 1 and overlap is None:
            raise Refusal(
                "privacy",
                "the run states its epsilon for a person at several nodes, and this node's policy "
                "does not say at how many nodes one person has rows ([privacy] overlap)",
            )
        if 1 < assumed < self.privacy.nodes:
            raise Refusal(
                "privacy",
                f"the run assumes that a person has rows at {assumed} nodes or fewer; by this "
                f"node's policy it may be {overlap}",
            )

    def _admit_steps(self, plan: ReleasePlan) -> None:
        """Refuse a plan with example-level steps that this node does not execute. The node itself
        must add the noise to every step.
        """
        if self.privacy.unit != "example":
            raise Refusal(
                "privacy",
                "a plan that protects single examples (privacy.unit = 'example'); this node's "
                "budget protects all of its data at once, so it answers plans with bounds on its "
                "whole update",
            )
        steps = plan.facts.steps
        # a plan's facts can have steps only under local trust
        if steps is None:
            raise Refusal("privacy", "example-level steps whose noise the server adds")
        if plan.family != "gaussian":
            raise Refusal("plan", "example-level steps with noise other than Gaussian")
        if type(steps.count) is not int or not all(
            math.isfinite(value) for value in (steps.rate, steps.batch)
        ):
            raise Refusal(
                "plan",
                "the number of example-level steps must be whole, and their rate and batch finite",
            )
        most = self.allow.most_epochs
        if steps.count > MOST_STEPS or steps.count * steps.rate > most:
            raise Refusal(
                "work",
                f"{steps.count} steps that sample each example with probability {steps.rate:g}; "
                f"at most {MOST_STEPS} steps, and {most} passes over the data, are allowed",
            )
