"""The interface of mechanisms, which plan each round from public configuration and past releases
alone.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fedlgm.checks import Positive, check_fields
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import users_code
from fedlgm.planning import charging
from fedlgm.planning.allocation import shares, spread
from fedlgm.planning.clipping import Scaling, eq_clip
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Unit

Variant = Literal["sound", "published"]


@dataclass(frozen=True)
class Mechanism:
    """Base of all mechanisms. A mechanism decides the bounds and the noise of every round.

    A subclass is a frozen dataclass whose fields are its options in a recipe. It implements `plan`,
    which must be pure: `plan` returns equal plans for equal arguments, and no argument holds
    private data. The neighbouring relation and the trust model are taken from the run's facts.

    Example:
        >>> import numpy as np
        >>> from dataclasses import dataclass
        >>> from fedlgm import Guarantee, Mechanism, ReleasePlan
        >>> @dataclass(frozen=True)
        ... class EqualNoise(Mechanism):
        ...     bound: float = 1.0
        ...
        ...     def plan(self, layers, facts, transcript):
        ...         clip = np.full(len(layers), self.bound / len(layers) ** 0.5)
        ...         sigma = np.full(len(layers), self.bound * facts.noise_multiplier)
        ...         return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", "bounded, then noised"))

    Attributes:
        name: registered name.

    Raises:
        ConfigError: an option is outside its range; the message names it.
    """

    variant: ClassVar[Variant] = "sound"
    """"sound", or "published" for a class that runs a paper's algorithm literally although the
    algorithm is not private.
    """

    unit: ClassVar[Unit] = "client"
    """Unit whose data differ between neighbouring data sets: "client" (each client's update is
    bounded when the updates are summed), or "example" (the trainer bounds every example's gradient,
    as for each class derived from `BoundsExamples`).
    """

    name: str

    def __post_init__(self) -> None:
        """Check the options against their annotations (see `check_fields`). Subclasses may add
        further checks.
        """
        check_fields(self.name, self)

    def table(self, layers: LayerTable) -> LayerTable:
        """Return the layers that this mechanism uses; by default these are all layers of the model,
        and the flat mechanism merges them into one.
        """
        return layers

    def calibrate(self, facts: RunFacts) -> float:
        """Compute the noise multiplier sigma_* of a round with which the whole run stays within its
        (epsilon, delta).

        See `privacy.calibrate`, and `privacy.whole_run` for runs whose rounds are not charged one
        by one.

        Args:
            facts: the run's facts, without a known `noise_multiplier`.

        Raises:
            ConfigError: the mechanism does not support the facts. This error is raised before
                anything runs.
            PrivacyError: no finite noise meets the budget.
        """
        return charging.of(facts).calibrate()

    def costs(self, layers: LayerTable, rounds: int) -> np.ndarray:
        """Return the cost of each round relative to a release with the run's multiplier, (sigma_* /
        sigma_eff)^2, [rounds].

        Mechanisms whose plans use other multipliers override this method. `Method.plan` refuses a
        plan whose cost differs, because only costs that are fixed in advance compose.

        Args:
            layers: `self.table(...)` of the model's layers.
            rounds: number T of rounds.
        """
        return np.ones(rounds)

    def check_run(self, layers: LayerTable, facts: RunFacts) -> None:
        """Refuse a run that is charged as one mechanism if this mechanism does not support such a
        charge.

        Args:
            layers: `self.table(...)` of the model's layers.
            facts: the run's facts, whose rounds are not charged one by one.

        Raises:
            ConfigError: the run is not supported; the message gives the reason.
        """
        what = (
            "noise correlated over rounds"
            if facts.noise is not None
            else f"{facts.sampling.scheme} sampling"
        )
        if self.variant == "published":
            raise ConfigError(
                f"{self.name}: the published variant is not private, and {what} does not make it "
                "private"
            )
        if not np.allclose(self.costs(layers, facts.rounds), 1.0, rtol=1e-9, atol=0.0):
            raise ConfigError(
                f"{self.name}: {what} is accounted for as one mechanism with the same noise "
                "multiplier in every round; this mechanism's noise changes over the rounds"
            )

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Plan the next round's release.

        Past releases may change the allocation of the noise, but not its total
        (`effective_multiplier`), because composition is proven for costs that are fixed in advance.

        Args:
            layers: `self.table(...)` of the model's layers.
            facts: the run's public facts, with the calibrated noise multiplier.
            transcript: past released outputs.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Bounded(Mechanism):
    """Base of mechanisms with an option `bound`, the bound of a unit's whole contribution.

    Attributes:
        bound: bound of the whole contribution, above 0.

    Example:
        >>> Bounded("mine", bound=0.5).bound
        0.5
    """

    bound: Positive = 1.0


class BoundsExamples(ABC):
    """Interface of mechanisms of unit "example", whose plans have `bounded_by = "trainer"`.

    Example:
        >>> from fedlgm import Sampling, mechanisms
        >>> mechanism, layers = mechanisms.get("dp-sgd", bound=0.5), LayerTable.from_sizes({"a": 3})
        >>> plan = mechanism.plan(layers, RunFacts(1.0, Sampling("poisson", 100, 0.1)), Transcript(0, ()))
        >>> isinstance(mechanism, BoundsExamples), plan.bounded_by, mechanism.scaling(plan).bound
        (True, 'trainer', 0.5)
    """

    unit: ClassVar[Unit]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.unit = "example"

    @abstractmethod
    def scaling(self, plan: ReleasePlan) -> Scaling:
        """Return the scaling that keeps the gradients of a step's examples within the plan's
        bounds. Like `plan`, this method must be pure.

        A layer that the plan does not release gets the factor 0.
        """


class PlansFromPrivateData:
    """A published variant whose plans depend on unprotected data, so that noise does not make a
    release private.

    The interfaces for such plans are in `fedlgm.mechanisms.private_plans`. In Flower runs, only the
    classes of `clients.published_client` and `strategies.published_strategy` run such a variant.
    """


class PlansFromAnswers:
    """A mechanism under local trust in which every client plans its layers from its own noisy
    answer to the round's queries.

    The answer and the layers are two releases of the client. Whatever the answer is, the two
    releases together cost as much as the round's common plan, so that plan is charged for both.
    """

    def plan_from_answer(self, plan: ReleasePlan, answer: np.ndarray) -> ReleasePlan:
        """Make the plan of one client, which has no queries.

        Args:
            plan: the round's common plan.
            answer: the client's noisy answers to the plan's queries, float64.
        """
        raise NotImplementedError


def require_mechanism(found: Any) -> Mechanism:
    """Check that a user's object is a mechanism, and return it.

    Raises:
        ConfigError: the object is not a mechanism, for example a class instead of an object.
    """
    if not isinstance(found, Mechanism) or not isinstance(getattr(found, "name", None), str):
        what = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
        raise ConfigError(
            "a mechanism must be an object of a dataclass derived from fedlgm.Mechanism, made "
            f"with its name, as in InverseSize('inverse-size'); got {what}{rule_hint(found)}"
        )
    return found


def rule_hint(found: object) -> str:
    """Return the end of a message about an object that is not a mechanism. If the object is a
    function, the text says how to register an allocation rule; otherwise it is empty.
    """
    return (
        "; fedlgm.allocation.register gives an allocation rule a name"
        if inspect.isfunction(found)
        else ""
    )


def code_of(kind: type[Mechanism], name: str) -> AbstractContextManager[None]:
    """Return the context `fedlgm.extension.loader.users_code` for a user's mechanism. For a bundled
    mechanism the context does nothing, because an error there is a defect of this library and keeps
    its traceback.

    Args:
        kind: the mechanism's class.
        name: the mechanism's name, for the message.
    """
    if kind.__module__.startswith("fedlgm."):
        return nullcontext()
    return users_code(f"mechanism {name!r}", kind)


def one_per_layer(
    owner: str, layers: LayerTable, **option: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Check an option that lists one number for each layer, and return it as float64 [K].

    Raises:
        ConfigError: the option does not have one entry per layer.

    Example:
        >>> one_per_layer("uniform", LayerTable.from_sizes({"a": 4, "b": 1}), public_norms=(2, 1)).tolist()
        [2.0, 1.0]
    """
    ((name, values),) = option.items()
    if len(values) != len(layers):
        raise ConfigError(
            f"{owner}: {name} has {len(values)} entries for {len(layers)} layers "
            f"({', '.join(layers.names)})"
        )
    return np.asarray(values, dtype=np.float64)


def released_scales(
    rule: str, bound: float, layers: LayerTable, released: np.ndarray, multiplier: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute bounds and noise scales of a release of n layers, float64 [K] each. Each released
    layer has bound S / sqrt(n); other layers have bound 0 and infinite noise.

    Args:
        rule: allocation rule of the noise, one of `fedlgm.planning.allocation.names()`.
        bound: l2 bound S of all layers together.
        layers: the model's layers.
        released: whether each layer is released, bool [K].
        multiplier: noise multiplier of the release.

    Example:
        >>> layers = LayerTable.from_sizes({"a": 4, "b": 1})
        >>> [part.tolist() for part in released_scales("uniform", 1.0, layers, np.array([True, False]), 2.0)]
        [[1.0, 0.0], [2.0, inf]]
    """
    clip, sigma = np.zeros(len(layers)), np.full(len(layers), math.inf)
    clip[released] = eq_clip(bound, int(released.sum()))
    share = shares(rule, clip[released], layers.sizes[released])
    sigma[released] = spread(share, clip[released], multiplier)
    return clip, sigma
