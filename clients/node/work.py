"""The work that a question requests: names that are installed on the node, with options that its policy allows."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clients.node.policy import Policy, Refusal
from fedlgm import mechanisms, tasks
from fedlgm.errors import FedlgmError
from fedlgm.mechanisms import Mechanism
from fedlgm.node_protocol import canonical
from fedlgm.tasks import Task
from fedlgm.training import LocalTraining

_LONGEST = 4096  # characters of a name with its options
_LARGEST = 1e30  # of a learning rate and the like; JSON has whole numbers that no float holds
_LONGEST_MECHANISM = 16_384  # three numbers for each of two hundred layers


class Work(BaseModel):
    """The names that a question requests, each with its options: {"name": "dp-sgd", "style": "per-layer"}.

    Every name must be installed on the node and listed in its policy. Options are public: they are part of the
    question, and so of the server's signature and the release's name. They state how a plan is executed; its cost, and
    whether the node executes it at all, depend on the plan's own numbers.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    mechanism: dict[str, Any]
    group_by: str = Field(default="module", pattern="^(module|tensor|adapter|factor|kind)$")
    task: dict[str, Any] = {"name": "classification"}
    model: dict[str, Any]
    training: dict[str, Any] = {}
    exact_sums: bool = False  # of example-level steps: gradients add up in float64

    @classmethod
    def parse(cls, raw: Any, policy: Policy) -> Work:
        """Parse the work that a question requests.

        Raises:
            Refusal: malformed, or not allowed by the policy.
        """
        try:
            work = cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            raise Refusal("work", f"work.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        allow = policy.allow
        for kind, section, allowed, longest in (
            ("mechanism", work.mechanism, allow.mechanisms, _LONGEST_MECHANISM),
            ("model", work.model, allow.models, _LONGEST),
            ("task", work.task, allow.tasks, _LONGEST),
        ):
            if section.get("name") not in allowed:
                asked = repr(section.get("name"))[:200]
                raise Refusal("work", f"{kind} {asked} is not allowed on this node; allowed: {', '.join(allowed)}")
            if len(canonical(section)) > longest:
                raise Refusal("work", f"the options of the {kind} are longer than {longest} characters")
        allow.check_options(work.mechanism["name"], options_of(work.mechanism))
        work.built()
        if work.local().epochs > allow.most_epochs:
            raise Refusal("work", f"training.epochs = {work.local().epochs}; at most {allow.most_epochs} are allowed")
        return work

    def built(self) -> Mechanism:
        """The mechanism with its options, in its sound variant: a node runs no other.

        Raises:
            Refusal: an unknown option, or a value outside its range.
        """
        options = options_of(self.mechanism)
        if "variant" in options:
            raise Refusal("work", "mechanism.variant does not apply to nodes: they make only sound releases")
        try:
            return mechanisms.get(self.mechanism["name"], **options)
        except Exception as error:  # options are the server's: anything may be wrong with them
            raise Refusal("work", f"mechanism: {error}"[:300]) from error

    def target(self) -> Task:
        """The task with its options."""
        return tasks.get(self.task["name"], **options_of(self.task))

    def local(self) -> LocalTraining:
        """Settings of local training.

        Raises:
            Refusal: unknown or wrong settings.
        """
        try:
            settings = LocalTraining(**self.training)
            numbers = {"lr": settings.lr, "momentum": settings.momentum, "gradient_clip": settings.gradient_clip or 0.0}
            for name, number in numbers.items():
                if type(number) not in (int, float) or not 0 <= number <= _LARGEST:
                    raise ValueError(f"{name} must be a number from 0 to {_LARGEST:g}")
            if settings.gradient_clip is not None and not settings.gradient_clip > 0:
                raise ValueError("gradient_clip must be positive")
            for name, whole in {"epochs": settings.epochs, "batch_size": settings.batch_size}.items():
                if type(whole) is not int or not 1 <= whole < 2**31:
                    raise ValueError(f"{name} must be a whole number of at least 1")
            return settings
        except (TypeError, ValueError, FedlgmError) as error:
            raise Refusal("work", f"training: {error}") from error


def options_of(section: dict[str, Any]) -> dict[str, Any]:
    """The options of a name."""
    return {key: value for key, value in section.items() if key != "name"}
