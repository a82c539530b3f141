"""What an attacker sees of an update under noise that is correlated over rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlgm import mechanisms
from fedlgm.aggregation import bound_update
from fedlgm.mechanisms.method import Method
from fedlgm.noise import correlation
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm_lab.attacks.observation import Observation

LAYERS = LayerTable.from_sizes({"a": 6000, "b": 4000})
ROUNDS = 8


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize(
    ("name", "round_"), [("banded", 1), ("banded", 7), ("blt", 1), ("square-root", 3)]
)
def test_the_attacker_reads_all_rounds_of_a_run(name, round_, secret):
    """One round alone is noisier than the run as a whole is, which is what its epsilon is about."""
    options = {"min_separation": 4} if name == "blt" else {"bands": 4}
    noise = correlation.get(name, ROUNDS, **options)
    facts = RunFacts(2.0, Sampling("cyclic", 40, 0.25, 4), rounds=ROUNDS, noise=noise)
    plan = Method(mechanisms.get("snr-consistent"), LAYERS, facts).plan(
        Transcript(round_ - 1, (torch.zeros(LAYERS.size),))
    )
    update = torch.full((LAYERS.size,), 3.0)
    seen = Observation.released(update, plan, KeyRing(5, secret=secret), round_)
    column = noise.matrix()[:, round_ - 1]
    assert seen.sigma == pytest.approx(plan.sigma / np.linalg.norm(column))
    assert (seen.sigma < plan.round_sigma).all()
    left = (seen.update - bound_update(update, plan)).split(LAYERS.sizes.tolist())
    for part, sigma in zip(left, seen.sigma, strict=True):
        assert float(part.mean()) == pytest.approx(0.0, abs=5 * sigma / part.numel() ** 0.5)
        assert float(part.std()) == pytest.approx(sigma, rel=0.05)
