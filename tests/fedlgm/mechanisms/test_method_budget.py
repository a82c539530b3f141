"""A noise multiplier that is given is kept or refused, never replaced in silence."""

from __future__ import annotations

import pytest
import torch

from fedlgm import RunFacts, Sampling, mechanisms
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.method import Method


def method(multiplier, **budget):
    facts = RunFacts(multiplier, Sampling("poisson", 100, 0.1), rounds=10, **budget)
    return Method.of(torch.nn.Linear(3, 2), mechanisms.get("snr-consistent"), facts)


def test_both_are_refused_unless_they_agree():
    """The given noise was replaced by a ninth of it."""
    with pytest.raises(
        ConfigError, match=r"noise_multiplier = 5 and epsilon = 8 are both given, .* needs 0\.\d+:"
    ):
        method(5.0, epsilon=8.0, delta=1e-5)
    needed = method(0.0, epsilon=8.0, delta=1e-5).facts.noise_multiplier
    assert method(needed, epsilon=8.0, delta=1e-5).facts.noise_multiplier == needed


def test_noise_without_epsilon_stays():
    facts = method(5.0, delta=1e-5).facts
    assert (facts.noise_multiplier, facts.epsilon) == (5.0, None)
    with pytest.raises(ConfigError, match="calibrated to a budget"):
        method(0.0, delta=1e-5)
