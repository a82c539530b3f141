"""The work that a question requests, by names that are installed on the node, with options.

The names and options come from the server and may be wrong in any way, so every error becomes a
refusal. This module loads no torch, so that the service's own process can read works without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlgm.wording import first_problem
from fedlgm_nodes.policy import Data, Policy, Refusal
from fedlgm_nodes.protocol.messages import canonical

if TYPE_CHECKING:
    from fedlgm.mechanisms import Mechanism
    from fedlgm.training import LocalTraining

_LONGEST = 4096  # largest number of characters of a name with its options
# largest value of a learning rate and similar settings; JSON has whole numbers that no float holds
_LARGEST = 1e30
_LONGEST_MECHANISM = 16_384  # enough for three numbers per layer with 200 layers


class Table(BaseModel):
    """The columns, classes and figures of the server's public table, which must equal those of the
    node.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    inputs: list[str]
    labels: list[str] = []
    standardise: dict[str, list[float]] = {}

    def check(self, data: Data) -> None:
        """Refuse a work whose columns, classes or figures differ from the policy's.

        Otherwise the model could take one column for another, and no answer would show it.

        Raises:
            Refusal: the features, the class names or the figures for standardising differ.
        """
        if not data.is_table:  # arrays have no names
            return
        ours = {name: list(figures) for name, figures in data.standardise.items()}
        for key, asked, written in (
            ("features", self.inputs, list(data.features)),
            ("class_names", self.labels, list(data.class_names)),
            ("standardise", self.standardise, ours),
        ):
            if asked != written:
                raise Refusal(
                    "work",
                    f"the work's {key} are not those of [data] in this node's policy: they are "
                    f"{canonical(asked)}, in this order"[:900],
                )


class Work(BaseModel):
    """The names that a question requests, each with its options, for example {"name": "dp-sgd",
    "style": "per-layer"}.

    Every name must be installed on the node and listed in its policy. The options are public,
    because they are in the question. They are therefore covered by the server's signature, and the
    release's name depends on them. They state how a plan is executed, whereas its cost depends on
    the plan's numbers.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    mechanism: dict[str, Any]
    group_by: str = Field(default="module", pattern="^(module|tensor|adapter|factor|kind)$")
    task: dict[str, Any] = {"name": "classification"}
    model: dict[str, Any]
    training: dict[str, Any] = {}
    exact_sums: bool = False  # of example-level steps: gradients add up in float64
    table: Table | None = None  # if the server's public rows are a table
    people: bool = False  # the run's epsilon is stated for a person, who counts at one node

    @classmethod
    def parse(cls, raw: Any, policy: Policy) -> Work:
        """Parse the work that a question requests.

        Raises:
            Refusal: the work is malformed, or the policy does not allow it.
        """
        try:
            work = cls.model_validate(raw)
        except ValidationError as error:
            raise Refusal("work", f"work.{first_problem(error)}") from error
        allow = policy.allow
        for kind, section, allowed, longest in (
            ("mechanism", work.mechanism, allow.mechanisms, _LONGEST_MECHANISM),
            ("model", work.model, allow.models, _LONGEST),
            ("task", work.task, allow.tasks, _LONGEST),
        ):
            if section.get("name") not in allowed:
                asked = repr(section.get("name"))[:200]
                raise Refusal(
                    "work",
                    f"{kind} {asked} is not allowed on this node; allowed: {', '.join(allowed)}",
                )
            if len(canonical(section)) > longest:
                raise Refusal(
                    "work", f"the options of the {kind} are longer than {longest} characters"
                )
        allow.check_options(work.mechanism["name"], options_of(work.mechanism))
        if work.table is not None:
            work.table.check(policy.data)
        if work.people and policy.data.people is None:
            raise Refusal(
                "work",
                "the run states its epsilon for a person, and this node's policy does not say whose "
                "data other nodes use ([data] people)",
            )
        return work

    def values(self) -> dict[str, Any]:
        """Plain values, from which the names of releases and works are derived. A work without a
        table and people has the same values as in earlier versions, and so the same names.
        """
        return self.model_dump(
            exclude={key for key in ("table", "people") if not getattr(self, key)}
        )

    def is_exact(self, policy: Policy) -> bool:
        """Whether the gradients of examples are summed in float64, because the server or the node's
        policy requires it.
        """
        return self.exact_sums or policy.privacy.exact_sums

    def built(self) -> Mechanism:
        """Build the mechanism with its options, in its sound variant, which is the only one that
        nodes run.

        Raises:
            Refusal: an option is unknown, or a value is outside its range.
        """
        from fedlgm import mechanisms

        options = options_of(self.mechanism)
        if "variant" in options:
            raise Refusal(
                "work", "mechanism.variant does not apply to nodes: they make only sound releases"
            )
        with refuse_errors("mechanism"):
            return mechanisms.get(self.mechanism["name"], **options)

    def local(self) -> LocalTraining:
        """Build the settings of local training.

        Raises:
            Refusal: a setting is unknown, or its value is out of range.
        """
        from fedlgm.training import LocalTraining

        with refuse_errors("training"):
            settings = LocalTraining(**self.training)
            numbers = {
                "lr": settings.lr,
                "momentum": settings.momentum,
                "gradient_clip": settings.gradient_clip or 0.0,
            }
            numbers |= (
                {} if settings.weight_decay is None else {"weight_decay": settings.weight_decay}
            )
            for name, number in numbers.items():
                if type(number) not in (int, float) or not 0 <= number <= _LARGEST:
                    raise ValueError(f"{name} must be a number from 0 to {_LARGEST:g}")
            if settings.gradient_clip is not None and not settings.gradient_clip > 0:
                raise ValueError("gradient_clip must be positive")
            for name, count in {
                "epochs": settings.epochs,
                "batch_size": settings.batch_size,
            }.items():
                if type(count) is not int or not 1 <= count < 2**31:
                    raise ValueError(f"{name} must be a whole number of at least 1")
            return settings


@contextmanager
def refuse_errors(what: str) -> Iterator[None]:
    """Turn any error in the block into a refusal. Such an error is caused by the server's names and
    options, or by the operator's own model.

    Raises:
        Refusal: the block raises any error.
    """
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        raise Refusal("work", f"{what}: {error}"[:300]) from error


def options_of(section: dict[str, Any]) -> dict[str, Any]:
    """The options in a section of a work, which are all its entries but the name."""
    return {key: value for key, value in section.items() if key != "name"}
