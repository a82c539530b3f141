"""Settings of the applications, from small TOML files that are checked like recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import tomli_w
from pydantic import Field, ValidationError, model_validator

from fedlgm.errors import ConfigError
from fedlgm.files import read_toml
from fedlgm.noise.draws import Family
from fedlgm.privacy.guarantee import Relation
from fedlgm.wording import describe_problem
from fedlgm_lab.applications import pca
from simulations.config.overrides import Overrides, settings
from simulations.config.sections import Count, Section, Seed

_BUNDLED = Path(__file__).parent / "recipes"


class Settings(Section):
    """Settings that both applications share.

    Attributes:
        epsilon: budget of the whole run.
        delta: delta of the budget. The default is 0 for Laplace noise and, for Gaussian noise,
            1/N^2 with N rows.
        clients: number of clients among which the rows are divided.
        seed: public seed of a simulation.
    """

    epsilon: float = Field(gt=0)
    delta: float | None = Field(default=None, ge=0, lt=1)
    clients: Count
    seed: Seed = 0

    @classmethod
    def load(cls, default: str, path: Path | None, overrides: Overrides = ()) -> Self:
        """Load the settings: bundled defaults, then the file `path`, then "key=value" texts or a
        mapping.

        Later values override earlier ones.

        Raises:
            ConfigError: the file does not exist or is not TOML, a key is unknown, or a value is out
                of range.
        """
        raw = read_toml(_BUNDLED / f"{default}.toml") | ({} if path is None else read_toml(path))
        raw |= settings(overrides)
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(
                "\n".join(describe_problem(item, cls.model_fields) for item in error.errors())
            ) from error

    @property
    def pure(self) -> bool:
        """Whether the noise is Laplace noise."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _delta_fits(self) -> Self:
        if self.delta is not None and (self.delta == 0) != self.pure:
            raise ValueError(
                "delta must be 0 for Laplace noise (its releases are pure and their epsilons add "
                "up)"
                if self.pure
                else "delta must be > 0 for Gaussian noise"
            )
        return self

    def delta_of(self, rows: int) -> float:
        """Return the delta of the budget for `rows` rows."""
        if self.delta is not None:
            return self.delta
        return 0.0 if self.pure else 1 / rows**2

    def to_toml(self) -> str:
        """Format all settings as TOML, including defaults."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


class DescentSettings(Settings):
    """Settings of `fedlgm apply coordinate-descent`.

    Attributes:
        data: name of a data set of `fedlgm_lab.applications.datasets`.
        scaling: scaling of the set.
        rule: allocation of a pass's budget to the coordinates.
        family: law of the noise.
        relation: neighbouring relation, whose unit is one row.
        passes: number of passes over the coordinates.
        clip: l2 bound of a row's gradient.
        rate: learning rate relative to 1 / M_i.
        strength: strength of the regulariser: l1 (regression) or squared l2 (two classes).
    """

    data: Literal["diabetes", "breast-cancer", "california", "electricity"]
    scaling: Literal["range", "standardized", "centered"]
    rule: Literal["inid", "spr", "iid"]
    family: Family
    relation: Relation
    passes: Count
    clip: float = Field(gt=0)
    rate: float = Field(gt=0)
    strength: float = Field(ge=0)

    @property
    def pure(self) -> bool:
        """Whether the noise is Laplace noise."""
        return self.family == "laplace"


class PcaSettings(Settings):
    """Settings of `fedlgm apply pca`.

    Attributes:
        data: "synthetic" (`fully_random_rows`) or "digits" (scikit-learn's, rows of unit length).
        method: one of `pca.methods()`.
        rank: number of components.
        dimension: number of features of synthetic data.
        rows: number of rows of synthetic data.
    """

    data: Literal["synthetic", "digits"]
    method: str
    rank: Count
    dimension: Count
    rows: Count

    @property
    def pure(self) -> bool:
        """Whether the noise is Laplace noise."""
        return self.method.startswith("laplace")

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.method not in pca.methods():
            raise ValueError(f"method: unknown {self.method!r}; known: {', '.join(pca.methods())}")
        return self
