"""What the LaDP-FL paper states: its KL scores, the constant of Theorem 3 and the sensitivity of
local training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import logsumexp
from torch import nn

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms.ladp import kl_score, layer_divergences, theorem3_constant, theorem3_delta
from fedlgm.mechanisms.ladp_frame import bound_by_training, noise_constant
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import gaussian_delta
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer

LAYERS = LayerTable.from_sizes({"a": 40, "b": 200, "c": 10})

# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "reference", "expected"),
    [
        ([1, 2, 3], [1, 1, 1], 0.266216707),
        ([1, 2, 3], [3, 2, 1], 1.150420766),
        ([1, 2, 3], [11, 12, 13], 0.0),
        ([[1, 2], [3, 1]], [[1, 2], [3, 1]], 0.0),
        ([1000.0, 0.0], [0.0, 1000.0], 1000.0),  # beyond the range of exp
        ([0.0, 1000.0], [0.0, -1000.0], 1000.0),
    ],
)
def test_known_divergences(local: list, reference: list, expected: float) -> None:
    assert kl_score(np.array(local, float), np.array(reference, float)) == pytest.approx(
        expected, abs=1e-9
    )
    assert kl_score(torch.tensor(local).float(), torch.tensor(reference).float()) == pytest.approx(
        expected, abs=1e-6
    )


@given(
    hnp.arrays(np.float64, st.integers(1, 50), elements=st.floats(-300, 300)),
    st.integers(0, 2**16),
    st.floats(0, 50),
)
def test_divergence_is_that_of_the_softmaxes(weights: np.ndarray, seed: int, spread: float) -> None:
    other = weights + spread * np.random.default_rng(seed).normal(size=weights.shape)
    before = weights.copy()
    log_p, log_q = weights - logsumexp(weights), other - logsumexp(other)
    expected = float(np.sum(np.exp(log_p) * (log_p - log_q)))
    assert kl_score(weights, other) == pytest.approx(expected, abs=1e-9, rel=1e-9)
    assert kl_score(weights, other) >= 0
    np.testing.assert_array_equal(weights, before)


@pytest.mark.parametrize(("size", "rms"), [(1728, 0.01), (36_864, 0.005), (2_359_296, 0.0002)])
def test_divergence_is_half_the_variance_of_a_small_change(size: int, rms: float) -> None:
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(size, generator=generator, dtype=torch.float64) * 0.05
    change = torch.randn(size, generator=generator, dtype=torch.float64) * rms
    weights = torch.softmax(reference, 0)
    variance = float((weights * change**2).sum() - (weights * change).sum() ** 2)
    score = kl_score(reference + change, reference)
    assert score == pytest.approx(variance / 2, rel=0.01)
    # The naive difference of logarithms, which keeps half the digits, is told apart.
    if size > 1_000_000:
        single = torch.softmax((reference + change).float(), 0)
        naive = float((single * (single.log() - reference.float().log_softmax(0))).sum())
        assert abs(naive / score - 1) > 0.01


def test_scores_by_layer_and_bad_input() -> None:
    local, reference = torch.randn(2, LAYERS.size, generator=torch.Generator().manual_seed(1)) / 10
    by_hand = [
        kl_score(a, b) for a, b in zip(LAYERS.split(local), LAYERS.split(reference), strict=True)
    ]
    assert layer_divergences(LAYERS, local, reference).tolist() == by_hand
    assert math.isnan(kl_score([1.0, math.nan], [0.0, 0.0]))
    with pytest.raises(ValueError, match="equally many"):
        kl_score([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="equally many"):
        kl_score([], [])


# -- Theorem 3 and the sensitivity -------------------------------------------------------------------------------------


def test_theorem3_constants() -> None:
    assert theorem3_constant(0.2, 0.02) == pytest.approx(1.427659, abs=1e-6)
    assert theorem3_constant(0.3, 0.02) == pytest.approx(1.460330, abs=1e-6)
    assert theorem3_constant(0.2, 0.02) / 0.2 * 8 == pytest.approx(57.1064, abs=1e-4)
    assert theorem3_constant(0.3, 0.02) / 0.3 * 8 == pytest.approx(38.9421, abs=1e-4)
    assert theorem3_constant(0.5, 0.2) == pytest.approx(
        (1 + math.sqrt(2)) / 2
    )  # the theorem's other case
    with pytest.raises(ConfigError, match="epsilon"):
        theorem3_constant(0.0, 0.02)
    with pytest.raises(ConfigError, match="delta"):
        theorem3_constant(0.2, 1.0)


def test_theorem3_is_false_for_small_delta() -> None:
    assert theorem3_delta(0.2, 0.02) == pytest.approx(0.005331, abs=1e-6)
    assert theorem3_delta(0.3, 0.02) == pytest.approx(0.007623, abs=1e-6)
    assert theorem3_delta(0.2, 1e-5) == pytest.approx(2.36e-4, abs=1e-6)
    assert noise_constant("theorem3", 0.2, 0.02) == theorem3_constant(0.2, 0.02)
    with pytest.raises(PrivacyError, match=r"0\.000236"):
        noise_constant("theorem3", 0.2, 1e-5)
    assert gaussian_delta(0.2 / noise_constant("classical", 0.2, 1e-5), 0.2) < 1e-5
    training = LocalTraining(lr=0.1, epochs=2, batch_size=50, gradient_clip=20.0)
    sampling = Sampling("poisson", 100, 0.1)
    facts = RunFacts(
        14.2765876859, sampling, "replace-one", "local", 40, 0.2, 1e-5, training=training
    )
    frame = mechanisms.get("ladp", variant="published").plan(
        LAYERS, facts, Transcript.start(torch.ones(LAYERS.size))
    )
    assert "0.000236" in frame.guarantee.reason


@pytest.mark.parametrize(("steps", "distance"), [(2, 8.0), (3, 12.0), (20, 80.0)])
def test_opposite_gradients_reach_the_bound_of_all_steps(steps: int, distance: float) -> None:
    """Two clients whose clipped gradients point in opposite directions end 2 eta steps G_c
    apart."""

    class Saturated(nn.Module):
        """Its loss is linear in the weights: huge gradients of a constant direction."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            score = (x * self.weights).sum(dim=1)
            return torch.stack([score, -score], dim=1) - torch.tensor([1e6, 0.0])

    settings = LocalTraining(lr=0.1, epochs=1, batch_size=50, gradient_clip=20.0)
    module = Saturated()
    layers = LayerTable.from_module(module)
    trainer = SequentialTrainer(module, layers, settings)
    keys = KeyRing.from_seed(0)
    x = torch.full((50 * steps, 16), 100.0)
    y = torch.zeros(50 * steps, dtype=torch.long)
    ends = [
        next(
            trainer.updates(
                torch.zeros(16),
                [ClientTask(sign * x, y, keys.torch_generator(Purpose.TRAIN, 1), 1)],
            )
        )[0].clone()
        for sign in (1.0, -1.0)
    ]
    assert float((ends[0] - ends[1]).norm()) == pytest.approx(distance, rel=1e-5)
    counted = LocalTraining(lr=0.1, epochs=2, batch_size=50, gradient_clip=20.0)
    assert 2 * bound_by_training(counted) == pytest.approx(
        8.0
    )  # what the paper counts, whatever the steps


def test_only_clipped_plain_sgd_has_the_papers_sensitivity() -> None:
    with pytest.raises(ConfigError, match="gradient_clip"):
        bound_by_training(LocalTraining(lr=0.1))
    with pytest.raises(ConfigError, match="momentum"):
        bound_by_training(LocalTraining(lr=0.1, momentum=0.9, gradient_clip=1.0))
