from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise import correlation
from fedlgm.noise.correlation.stream import CorrelatedStream

STRATEGIES = [
    correlation.get("identity", 40),
    correlation.get("square-root", 40),
    correlation.get("square-root", 40, bands=5),
    correlation.get("banded", 40, bands=10),
    correlation.get("banded", 40, bands=1),
    correlation.get("banded", 40, bands=2),
    correlation.get("blt", 40),
    correlation.get("blt", 40, buffers=1, min_separation=4),
]
each_strategy = pytest.mark.parametrize(
    "c", STRATEGIES, ids=lambda c: f"{c.name}-{c.bands if c.bands else len(c.decays)}"
)


def draws(rounds: int, size: int) -> torch.Tensor:
    return torch.randn(
        rounds, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def run(stream: CorrelatedStream, z: torch.Tensor) -> torch.Tensor:
    return torch.stack([stream.next(row.clone()) for row in z])


@each_strategy
def test_noise_is_the_inverse_times_z(c):
    z = draws(40, 300)
    w = run(CorrelatedStream(c, 300), z)
    np.testing.assert_allclose(w, c.inverse() @ z.numpy(), rtol=0, atol=1e-12 if c.decays else 3e-6)
    if c.is_independent:
        assert torch.equal(w, z)
    elif not c.decays:
        assert torch.equal(w, w.float().double())  # what is added is what is kept


@pytest.mark.parametrize("bands", [10, 50])
def test_long_runs_stay_exact(bands):
    """What one round rounds does not grow: after 2,000 rounds the noise is off by what a float
    is."""
    c = correlation.get("square-root", 2000, bands=bands)
    z = draws(2000, 50)
    w = run(CorrelatedStream(c, 50), z)
    np.testing.assert_allclose(w, c.inverse() @ z.numpy(), rtol=0, atol=4e-6)


@each_strategy
def test_law(c):
    """Multiplied by C, the noise of all rounds is independent and standard normal; without C it is
    not (power)."""
    w = run(CorrelatedStream(c, 4000), draws(40, 4000)).numpy()
    white = c.matrix() @ w
    assert stats.kstest(white.ravel(), "norm").pvalue > 1e-3
    between = np.corrcoef(white) - np.eye(40)
    assert np.abs(between).max() < 5.5 / np.sqrt(4000)
    np.testing.assert_allclose(w.std(axis=1), c.noise_std(), rtol=0.08)
    if not c.is_independent:
        next_round = np.array([np.corrcoef(w[t], w[t + 1])[0, 1] for t in range(39)])
        assert next_round.mean() < -0.15 if c.bands != 1 else True


@each_strategy
def test_replayed_noise_is_the_same(c):
    size, z = 100_003, draws(13, 100_003)
    whole = run(CorrelatedStream(c, size), z)
    again = CorrelatedStream(c, size)
    again.replay(lambda t: z[t].clone(), 11)
    assert again.round == 11
    assert torch.equal(run(again, z[11:]), whole[11:])


@pytest.mark.parametrize("c", [STRATEGIES[3], STRATEGIES[6]], ids=lambda c: c.name)
def test_bits_depend_on_neither_threads_nor_pieces_nor_the_type_of_z(c):
    z = draws(12, 70_001).float().double()
    whole = run(CorrelatedStream(c, 70_001), z)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(CorrelatedStream(c, 70_001), z), whole)
            assert torch.equal(run(CorrelatedStream(c, 10_007), z[:, 5:10_012]), whole[:, 5:10_012])
    finally:
        torch.set_num_threads(threads)
    single = torch.stack(list(run(CorrelatedStream(c, 70_001), z.float())))
    assert torch.equal(single, whole.float())


def test_the_vector_is_overwritten():
    z = draws(1, 5)[0]
    assert CorrelatedStream(STRATEGIES[3], 5).next(z) is z


def test_nothing_to_release():
    stream = CorrelatedStream(STRATEGIES[3], 0)
    assert stream.next(torch.empty(0, dtype=torch.float64)).numel() == 0


def test_refused():
    stream = CorrelatedStream(correlation.get("banded", 2, bands=2), 3)
    with pytest.raises(
        ConfigError, match=r"float64 or float32 vector \[3\], got torch.float64 \[4\]"
    ):
        stream.next(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"got torch.int64 \[3\]"):
        stream.next(torch.zeros(3, dtype=torch.int64))
    stream.replay(lambda t: torch.zeros(3), 2)
    with pytest.raises(
        ConfigError, match="z is on meta, but the noise of earlier rounds is on cpu"
    ):
        stream.next(torch.zeros(3, device="meta"))
    with pytest.raises(PrivacyError, match="planned for 2 rounds"):
        stream.next(torch.zeros(3))
    with pytest.raises(ConfigError, match="already at round 2"):
        stream.replay(lambda t: torch.zeros(3), 1)
