"""Noise over the rounds of a run: the noise of each round, and its remainder in the model after
each round.

Correlated noise is larger in every single round and smaller in the model, which sums all rounds.
Independent noise at the same (epsilon, delta) is given for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlgm import privacy
from fedlgm.errors import PrivacyError
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation, Workload
from fedlgm.planning import charging
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.privacy.whole_run import WholeRun
from simulations.config.recipe import Recipe

SHOWN = 7  # rounds of a table in the terminal


@dataclass(frozen=True)
class NoiseOverRounds:
    """Root mean square l2 norms of noise, from the given plans, over all layers together unless
    stated otherwise.

    The model's noise is that of plain averaging or server momentum, before the server's learning
    rate is applied.

    Attributes:
        rounds: T.
        single: noise of each round's mean update, [T].
        so_far: noise of the model after each round, [T].
        same_schema: `so_far` of independent noise under the same participation, [T].
        sampled: `so_far` of independent noise with Poisson sampling at the same rate, [T]; None if
            no such noise meets the budget.
    """

    rounds: int
    single: np.ndarray
    so_far: np.ndarray
    same_schema: np.ndarray
    sampled: np.ndarray | None

    def series(self) -> dict[str, np.ndarray]:
        """`so_far` and its counterparts for independent noise, by name."""
        named = {"this run": self.so_far, "independent, same participation": self.same_schema}
        return (
            named
            if self.sampled is None
            else {**named, "independent, secret Poisson draws": self.sampled}
        )

    def rows(self, count: int = SHOWN) -> list[dict[str, float]]:
        """Figures of some rounds, among them the first and the last. A row has the number of the
        round as "round", and the attributes by name.
        """
        figures = {
            name: getattr(self, name) for name in ("single", "so_far", "same_schema", "sampled")
        }
        shown = np.unique(
            np.round(np.geomspace(1, self.rounds, min(count, self.rounds))).astype(int)
        ).tolist()
        return [
            {
                "round": t,
                **{
                    name: float(values[t - 1])
                    for name, values in figures.items()
                    if values is not None
                },
            }
            for t in shown
        ]

    def means(self) -> dict[str, float]:
        """Root mean squares over the rounds of `series`."""
        return {name: float(np.sqrt(np.mean(values**2))) for name, values in self.series().items()}


def noise_over_rounds(
    facts: RunFacts, sigma: np.ndarray, sizes: np.ndarray, workload: Workload
) -> NoiseOverRounds | None:
    """The noise of a run whose rounds are one mechanism; None for other runs.

    Args:
        facts: the run's facts, calibrated.
        sigma: noise scales sigma_j, [K], or of each round, [T, K]; not finite where not released.
        sizes: d_j, [K].
        workload: the server's linear map of the releases.
    """
    run = charging.of(facts).run
    if run is None or facts.noise_multiplier == 0:
        return None
    epsilon_delta = facts.budget()
    layers = layer_norms(sigma, sizes, facts.sampling)
    unit = np.sqrt(np.nansum(layers**2, axis=-1))
    identity = correlation.get("identity", facts.rounds)
    plain = noise_so_far(layers, identity, workload) / facts.noise_multiplier
    alone = WholeRun(identity, facts.sampling, facts.relation).calibrate(
        *epsilon_delta, facts.accountant
    )
    try:
        sampled = plain * privacy.calibrate(
            *epsilon_delta,
            steps=facts.rounds,
            sampling_rate=facts.sampling.rate,
            relation=facts.relation,
            accountant=facts.accountant,
        )
    except PrivacyError:
        sampled = None
    return NoiseOverRounds(
        facts.rounds,
        unit * run.noise_std,
        noise_so_far(layers, run.noise, workload),
        plain * alone,
        sampled,
    )


def stored_sigma(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Noise scales of a run's rows, float64 [T, K]; NaN where not released."""
    return np.array(
        [[np.nan if value is None else value for value in row["sigma"]] for row in rows]
    )


def layer_norms(sigma: np.ndarray, sizes: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Root mean square norms of noise of these scales in a round's mean, layer by layer; NaN where
    not released.
    """
    return np.where(np.isfinite(sigma), sigma, np.nan) * np.sqrt(sizes) / sampling.expected


def noise_so_far(layers: np.ndarray, noise: Correlation, workload: Workload) -> np.ndarray:
    """Noise of the model after each round, [T].

    Args:
        layers: noise norms of a round's mean for w of standard deviation 1, [K] or [T, K]; NaN
            where not released.
        noise: C.
        workload: A.
    """
    scales = np.nan_to_num(layers)
    if scales.ndim == 1 or (scales == scales[0]).all():
        unit = float(np.linalg.norm(scales if scales.ndim == 1 else scales[0]))
        return unit * np.sqrt(workload.variances(noise.coefficients, noise.rounds))
    # The noise of two rounds cancels only if both have the same scale. The map is A D C^-1, where D
    # holds the layer's scales.
    inverse = noise.inverse()
    rows = (workload.apply(scales[:, j, None] * inverse) for j in range(scales.shape[1]))
    return np.sqrt(sum(np.sum(each**2, axis=1) for each in rows))


def noise_in_words(recipe: Recipe) -> str:
    """A run's noise process and participation in words."""
    privacy_, sampling = recipe.privacy, recipe.sampling
    noise = recipe.noise
    if noise is None or noise.is_independent:  # one band is not a correlation
        kind = "independent in every round"
    elif noise.bands is None:
        kind = f"correlated over rounds ({privacy_.noise}, {len(noise.decays)} buffers)"
    else:
        kind = f"correlated over rounds ({privacy_.noise}, {noise.bands} bands)"
    if recipe.federation.participations is not None:
        taken = (
            f"{recipe.federation.participations} of each {recipe.federation.block_rounds} rounds"
        )
        return f"{kind}; every {recipe.unit} takes part in {taken}, a secret draw"
    if sampling.separation is None:
        return kind
    groups = f"{sampling.separation} groups take turns"
    schema = {
        "cyclic": groups,
        "min-separation": f"nobody within {sampling.separation} rounds of the last invitation",
        "grouped-poisson": f"{groups}, in each a secret draw at rate {sampling.within_group:g}",
    }[sampling.scheme]
    return f"{kind}; {schema}"
