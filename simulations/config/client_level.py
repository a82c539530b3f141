"""Rules for recipes with privacy.unit = "client", and the sampled unit of their runs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fedlgm import run_rules
from fedlgm.errors import ConfigError, prefix_key
from fedlgm.facts import LocalSteps, Sampling
from fedlgm.privacy.guarantee import Relation
from simulations.config.unit import UnitKind

if TYPE_CHECKING:
    from simulations.config.recipe import Recipe

_ONLY = {"bands": "'banded' or 'square-root'", "buffers": "'blt'"}
_KEYS = {
    "relation": "privacy.relation",
    "trust": "privacy.trust",
    "sampling": "federation.sampling",
    "cap": "privacy.max_participations",
}


def _options(noise: str) -> tuple[str, ...]:
    """Options of a kind of correlated noise."""
    if noise in ("independent", "given"):
        return ()
    from fedlgm.correlation import options_of  # SciPy's optimisers

    with prefix_key("privacy.noise"):
        return options_of(noise)


class ClientLevel(UnitKind):
    """All of a client's data; the sum bounds each client's update."""

    verb, flat = "bounds whole clients", "gaussian"

    def check(self, recipe: Recipe) -> None:
        """See `UnitKind.check`."""
        federation, privacy, local = recipe.federation, recipe.privacy, recipe.noised_by.uploads_released
        for key in ("sampling_rate", "steps", "exact_sums"):
            if getattr(recipe.training, key) is not None:
                raise ConfigError(f"training.{key} is for privacy.unit = 'example': leave it out here")
        scheme = federation.sampling
        noise = "" if privacy.noise == "independent" else f"privacy.noise = {privacy.noise!r}"
        capped = privacy.max_participations is not None
        settings = run_rules.Settings(scheme, federation.share, recipe.relation, recipe.noised_by, noise, capped=capped)
        run_rules.check(settings, _KEYS)
        if privacy.noise == "given" and privacy.correlation is None:
            raise ConfigError("privacy.noise = 'given' needs privacy.correlation: pass simulate(noise=a Correlation)")
        for key, kinds in _ONLY.items():
            if getattr(privacy, key) is not None and key not in _options(privacy.noise):
                raise ConfigError(f"privacy.{key} is for privacy.noise = {kinds}: leave it out here")
        if scheme not in run_rules.TURNS:
            self._check_separation(recipe)
        elif privacy.min_separation is not None:
            raise ConfigError(
                f"privacy.min_separation: {scheme!r} sampling lets a client take part in any round: set "
                "federation.sampling to 'cyclic', 'min-separation' or 'grouped-poisson'"
            )
        if local and privacy.max_participations is None:
            raise ConfigError(
                f"privacy.max_participations is needed under {privacy.trust} trust, because every participation "
                "costs privacy"
            )

    def _check_separation(self, recipe: Recipe) -> None:
        privacy, rounds = recipe.privacy, recipe.federation.rounds
        if recipe.federation.sampling == "grouped-poisson" and privacy.min_separation is None and privacy.bands is None:
            raise ConfigError(
                "federation.sampling = 'grouped-poisson' needs privacy.bands or privacy.min_separation, the number of "
                "groups"
            )
        with prefix_key("federation"):
            separation = recipe.sampling.separation
        for name, most in (("federation.rounds", rounds), ("the rounds between participations", separation)):
            if privacy.bands is not None and most is not None and privacy.bands > most:
                raise ConfigError(f"privacy.bands = {privacy.bands} is more than {name}, {most}")

    def warn_of_delta(self, recipe: Recipe) -> None:
        """See `UnitKind.warn_of_delta`."""
        delta, count, unit = recipe.privacy.delta, recipe.sampling.population, recipe.unit
        if delta >= 1 / count and recipe.mechanism.name != "none":
            warnings.warn(
                f"privacy.delta = {delta:g} is not below 1/{count}, one over the number of {unit}s: such a guarantee "
                f"permits the full publication of one {unit}'s data",
                stacklevel=3,
            )

    def relation(self, recipe: Recipe) -> Relation:
        """See `UnitKind.relation`."""
        if recipe.federation.sampling == "min-separation":
            return "zero-out"
        return "replace-one" if recipe.federation.sampling == "fixed" else recipe.noised_by.relation

    def sampled(self, recipe: Recipe, examples: int) -> tuple[Sampling, LocalSteps | None]:
        """See `UnitKind.sampled`: clients."""
        return recipe.sampling, None
