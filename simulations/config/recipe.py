"""The recipe, one TOML file that fully specifies a run, for the command line, notebooks and the
Flower app.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import BaseModel, ValidationError

from fedlgm import mechanisms
from fedlgm import noise as noises  # not its correlations, which load SciPy's optimisers
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_object
from fedlgm.files import path_of
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import Sampling
from fedlgm.planning.trust import NoisedBy
from fedlgm.planning.trust import get as noised_by
from fedlgm.privacy.guarantee import Relation, Unit
from fedlgm.wording import alternatives, prefix_key
from simulations.config import extends, fixed_noise, kept_releases, public_seed
from simulations.config import validation_messages as messages
from simulations.config.client_level import ClientLevel
from simulations.config.example_level import ExampleLevel
from simulations.config.named_sections import (
    Data,
    MechanismSection,
    Model,
    TaskSection,
    TrainerSection,
)
from simulations.config.overrides import Overrides, lay_over, override
from simulations.config.sections import (
    Deployment,
    Distributed,
    Federation,
    Label,
    Privacy,
    Risk,
    Run,
    Section,
    Training,
)
from simulations.config.statement_section import StatementSection
from simulations.config.unit import UnitKind
from simulations.config.user_level import UserLevel

UNITS: dict[Unit, UnitKind] = {
    "client": ClientLevel(),
    "example": ExampleLevel(),
    "user": UserLevel(),
}
BUNDLED = Path(__file__).parents[1] / "recipes"
DEFAULT = "digits"


class Recipe(Section):
    """A validated recipe; docs/api/recipe.md documents all sections.

    Unknown keys, wrong values and inconsistent sections raise a `ConfigError`, as in `load`.

    Example:
        >>> recipe = load("digits", ["federation.sampling='fixed'"])
        >>> recipe.sampling.scheme, recipe.relation  # fixed-size sampling proves nothing else
        ('fixed', 'replace-one')
    """

    name: Label = "custom"
    title: str = ""
    data: Data
    model: Model
    task: TaskSection = TaskSection()
    trainer: TrainerSection | None = None
    federation: Federation
    training: Training = Training()
    mechanism: MechanismSection
    privacy: Privacy
    run: Run = Run()
    distributed: Distributed | None = None
    deployment: Deployment | None = None
    risk: Risk | None = None
    statement: StatementSection | None = None

    def __init__(self, *names: Any, **sections: Any) -> None:
        if names:
            raise ConfigError(
                "a Recipe takes its sections by name; load_recipe('digits') reads a recipe by its "
                "name"
            )
        budget: Any = sections.get("privacy")
        derived = (
            isinstance(budget, Mapping)
            and budget.get("epsilon") is None
            and budget.get("noise_multiplier") is not None
        )
        # epsilon follows from the facts, which cannot be built without some value of epsilon
        if derived:
            sections = {**sections, "privacy": {**budget, "epsilon": 1.0}}
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(messages.explain(sections, error.errors(), Recipe)) from error
        for key, section in (
            ("mechanism", self.mechanism),
            ("task", self.task),
            ("trainer", self.trainer),
        ):
            if section is not None and not is_object(section.name):
                with messages.in_section(key, section.name):
                    section.build()
        if not is_object(self.mechanism.name):
            self.check_mechanism(mechanisms.unit_of(self.mechanism.name))
        for unit, kind in UNITS.items():
            for key in kind.keys:
                if key not in self.protects.keys and attrgetter(key)(self) is not None:
                    raise ConfigError(
                        f"{key} is for privacy.unit = {unit!r}: set it, or leave {key} out"
                    )
        self.protects.check(self)
        kept_releases.check(self)
        if derived:
            vars(self)["privacy"] = self.privacy.model_copy(
                update={"epsilon": fixed_noise.epsilon_of(self)}
            )
        elif self.privacy.noise_multiplier is not None:
            fixed_noise.require_agreement(self)

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """A recipe from plain values; the errors are those of `load`.

        Raises:
            ConfigError: the values are not a mapping, or a value is refused.
        """
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping) or not all(isinstance(key, str) for key in obj):
            raise ConfigError(f"a recipe's values must be a mapping of its sections, got {obj!r}")
        return cls(**obj)

    def check_mechanism(self, unit: Unit) -> None:
        """Refuse a mechanism for another unit of protection.

        Args:
            unit: the mechanism's unit.

        Raises:
            ConfigError: the message lists the mechanisms that fit.
        """
        if unit == self.protects.mechanisms:
            return
        choices = ", ".join(
            name
            for name in mechanisms.names(self.protects.mechanisms)
            if mechanisms.is_private(name)
        )
        raise ConfigError(
            f"mechanism.name: {self.mechanism.name} {UNITS[unit].verb}, but privacy.unit is "
            f"{self.unit!r}: set privacy.unit = {unit!r}, or use one of {choices}"
        )

    @property
    def unit(self) -> Unit:
        """The unit whose data a neighbour changes."""
        return self.privacy.unit or "client"

    @property
    def units(self) -> str:
        """The units that an attack on the run looks for, in the plural: people if the run states an
        overlap.
        """
        return "people" if self.federation.overlap else f"{self.unit}s"

    @property
    def noised_by(self) -> NoisedBy:
        """The party that adds the noise."""
        with prefix_key("privacy.trust"):
            return noised_by(self.privacy.trust, self.shares)

    @property
    def shares(self) -> Shares | None:
        """The shares of the noise, as a library object."""
        return None if self.distributed is None else self.distributed.shares

    @property
    def protects(self) -> UnitKind:
        """The rules of the unit of protection."""
        return UNITS[self.unit]

    @property
    def sampling(self) -> Sampling:
        """Sampling of the participants, as a library object.

        Raises:
            ConfigError: the population cannot keep the separation.
        """
        federation, privacy, of = self.federation, self.privacy, self.protects.of
        scheme, share, population = federation.sampling, federation.share, federation.participants
        if scheme in ("poisson", "fixed"):
            return Sampling(scheme, population, share, of=of)
        if scheme == "allocation" and self.protects.mechanisms == "example":
            return Sampling("poisson", population, 1.0)  # the examples are allocated
        if scheme == "allocation":
            rounds = {"participations": federation.participations, "block": federation.block_rounds}
            return Sampling(scheme, population, share, of=of, **rounds)
        separation = privacy.min_separation
        if separation is None and scheme == "grouped-poisson":
            separation = privacy.bands
        return Sampling(scheme, population, share, separation or max(1, int(1 / share + 1e-6)), of)

    @property
    def noise(self) -> noises.correlation.Correlation | None:
        """Correlation of the noise over the rounds; None for independent noise.

        Raises:
            ConfigError: a correlation of the user's own is for another number of rounds.
        """
        privacy, rounds = self.privacy, self.federation.rounds
        if privacy.noise == "independent":
            return None
        correlation = noises.correlation
        if privacy.noise == "given":
            with prefix_key("privacy.correlation"):
                noise = correlation.Correlation.from_dict(privacy.correlation or {})
                if noise.rounds != rounds:
                    raise ConfigError(
                        f"it is for {noise.rounds} rounds, but the run has federation.rounds = "
                        f"{rounds}"
                    )
            return noise
        separation, takes = self.sampling.separation or 1, correlation.options_of(privacy.noise)
        bands = min(separation if privacy.bands is None else privacy.bands, rounds)
        offered = {
            "workload": self.workload,
            "bands": bands,
            "min_separation": separation,
            "buffers": privacy.buffers,
        }
        given = {
            name: value for name, value in offered.items() if name in takes and value is not None
        }
        return correlation.get(privacy.noise, rounds, **given)

    @property
    def workload(self) -> noises.correlation.Workload:
        """The server's linear map of the releases, for which noise is optimised: averaging, or
        momentum.

        Plain averaging is also assumed for optimizers that are not linear and for users' own
        optimizers. No privacy figure depends on this choice.
        """
        federation = self.federation
        return noises.correlation.Workload(
            federation.server_momentum if federation.server_optimizer == "momentum" else 0.0
        )

    @property
    def relation(self) -> Relation:
        """The neighbouring relation, as written or as implied by sampling and trust."""
        if self.privacy.relation is not None:
            return self.privacy.relation
        return self.protects.relation(self)

    def with_values(self, **sections: Mapping[str, Any]) -> Self:
        """The recipe with other values of keys in these sections. The new values are not checked.

        Args:
            sections: new values by key, for each section.
        """
        return self.model_copy(
            update={
                name: getattr(self, name).model_copy(update=dict(values))
                for name, values in sections.items()
            }
        )

    def plain_values(self) -> dict[str, Any]:
        """Plain values to change, as a user writes them. An epsilon that follows from a noise
        multiplier is left out.

        Example:
            >>> sorted(load("digits", ["privacy.noise_multiplier=2"]).plain_values()["privacy"])[:2]
            ['accountant', 'delta']
        """
        raw = self.model_dump(exclude_none=True)
        if self.privacy.noise_multiplier is not None:
            del raw["privacy"]["epsilon"]
        return raw

    def to_toml(self) -> str:
        """The whole recipe as TOML, including defaults."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def names() -> tuple[str, ...]:
    """Bundled recipes.

    Example:
        >>> "digits" in names()
        True
    """
    return tuple(sorted(path.stem for path in BUNDLED.glob("*.toml")))


def sections() -> dict[str, type[BaseModel]]:
    """The sections of a recipe, by name.

    Example:
        >>> "epsilon" in sections()["privacy"].model_fields
        True
    """
    kinds = {name: messages.section_kind(field) for name, field in Recipe.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def load(recipe: str | Path | None = None, overrides: Overrides = ()) -> Recipe:
    """Read a recipe.

    Args:
        recipe: a bundled name, a path of a TOML file, or None for the default.
        overrides: see `override`.

    Raises:
        ConfigError: there is no such recipe, it is not TOML, a key is unknown, or a value is wrong;
            the message gives the key's path and the reason.

    Example:
        >>> load("digits", ["federation.rounds=3", "privacy.epsilon=2"]).federation.rounds
        3
        >>> load("digits", ["federation.rounds=0"])
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: federation.rounds: ...
    """
    raw = read(recipe)
    override(raw, overrides)
    return Recipe(**raw)


def read(recipe: str | Path | None = None) -> dict[str, Any]:
    """Plain values of a recipe, including values of the recipe that it extends; arguments and
    errors as in `load`.

    Raises:
        ConfigError: `recipe` is neither a name nor a file, or as for `load`.

    Example:
        >>> read("digits")["data"]["name"]
        'digits'
    """
    if not isinstance(recipe, str | Path | None):
        meant = "data=" if isinstance(recipe, dict) and "train" in recipe else "overrides="
        meant = "model=" if hasattr(recipe, "state_dict") else meant
        raise ConfigError(
            f"the first argument must be a recipe's name or file, got {type(recipe).__name__}: "
            f"pass this by name, {meant}..."
        )
    merged: dict[str, Any] = {}
    file = _locate(DEFAULT if recipe is None else str(recipe))
    for path, raw in extends.chain(file, lambda _, base: _locate(base), "recipes"):
        lay_over(merged, raw)
        if path.resolve().parent == BUNDLED.resolve():
            public_seed.mark(merged)
        merged |= {"name": raw.get("name", path.stem)}
    return merged


def _locate(recipe: str) -> Path:
    path = path_of("recipe", recipe)
    bundled = BUNDLED / f"{recipe}.toml"
    if bundled.is_file():
        return bundled
    if path.is_file():
        return path
    raise ConfigError(f"no recipe {recipe!r}: neither a file nor bundled; {bundled_like(recipe)}")


def bundled_like(name: str) -> str:
    """Text for a message: the bundled recipes with a similar name, or else the command that lists
    all recipes.

    Example:
        >>> bundled_like("digit")
        "did you mean 'digits'?"
    """
    hint = alternatives(name, names())
    return (
        hint if hint.endswith("?") else f"`fedlgm doctor` lists the bundled ones, such as {DEFAULT}"
    )
