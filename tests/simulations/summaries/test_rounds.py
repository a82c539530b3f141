from __future__ import annotations

import math

import numpy as np
import pytest

from fedlgm.noise import correlation
from fedlgm.noise.correlation import Workload
from fedlgm.planning.facts import RunFacts, Sampling
from simulations.config import recipe as recipes
from simulations.summaries.rounds import noise_in_words, noise_over_rounds


def test_a_layer_that_is_not_released_has_no_noise_over_the_rounds() -> None:
    facts = RunFacts(
        1.0, Sampling("cyclic", 40, 0.25, 4), rounds=6, epsilon=8.0, delta=1e-5,
        noise=correlation.get("banded", 6, bands=4),
    )  # fmt: skip
    found = noise_over_rounds(facts, np.array([2.0, math.inf]), np.array([9, 4]), Workload())
    assert found is not None
    alone = noise_over_rounds(facts, np.array([2.0]), np.array([9]), Workload())
    assert alone is not None
    assert found.rows() == alone.rows()


def test_noise_of_the_model_where_scales_change_over_the_rounds() -> None:
    """Correlated noise cancels between equal scales only: by the last plan alone a learnt split
    showed too little."""
    rounds, chance = 40, np.random.default_rng(0)
    facts = RunFacts(
        1.0, Sampling("cyclic", 40, 0.25, 4), rounds=rounds, epsilon=8.0, delta=1e-5,
        noise=correlation.get("banded", rounds, bands=4),
    )  # fmt: skip
    sizes, workload = np.array([9, 4]), Workload(momentum=0.5)
    sigma = np.exp(0.3 * chance.standard_normal((rounds, 2)))
    sigma[7, 1] = math.inf
    changing, constant = (
        noise_over_rounds(facts, each, sizes, workload) for each in (sigma, sigma[-1])
    )
    assert changing is not None
    assert constant is not None
    alike = noise_over_rounds(facts, np.tile(sigma[-1], (rounds, 1)), sizes, workload)
    assert alike is not None
    assert np.array_equal(alike.so_far, constant.so_far)
    z = chance.standard_normal((rounds, 20_000, 2))
    w = np.einsum("tr,rnk->tnk", facts.noise.inverse(), z)  # type: ignore[union-attr]
    scales = np.nan_to_num(sigma, posinf=0.0)
    for noise, told in ((w, changing.so_far), (z, changing.same_schema / changing.same_schema[0])):
        models = np.stack([workload.apply(scales[:, None, k] * noise[:, :, k]) for k in range(2)])
        norms = np.sqrt((models**2).mean(axis=2).T @ sizes) / facts.sampling.expected
        assert told * (1 if noise is w else norms[0]) == pytest.approx(norms, rel=0.03)
    assert np.abs(constant.so_far / changing.so_far - 1).max() > 0.2  # power


def test_one_band_is_called_independent() -> None:
    assert noise_in_words(recipes.load("correlated-digits", ["federation.rate=1.0"])).startswith(
        "independent in every round"
    )
    assert noise_in_words(recipes.load("correlated-digits")).startswith(
        "correlated over rounds (banded, 10 bands)"
    )
