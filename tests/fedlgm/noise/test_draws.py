"""The noise is what it says: law, scale, independence, grid. Every test that accepts also rejects
what is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedlgm.noise.draws import add_noise_, draw, grid_step
from fedlgm.noise.keys import KeyRing, Purpose, mt19937_state
from fedlgm.noise.release import SERVER, fingerprint, release
from tests.support.noise_plans import LAWS, SIGMA, plan


def noise(
    family: str = "gaussian", seed: int = 0, round_: int = 1, party: int = SERVER
) -> list[torch.Tensor]:
    made = plan(family)
    flat = release(torch.zeros(made.size), made, KeyRing(seed), round_, party)
    return [part.clone() for part in made.layers.split(flat)]


@pytest.mark.parametrize("family", LAWS)
def test_law_and_scale_of_every_layer(family):
    for part, scale in zip(noise(family), SIGMA, strict=True):
        values = part.double().numpy()
        if len(values) < 100:
            continue
        assert stats.kstest(values, LAWS[family](scale=scale).cdf).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(values, LAWS[family](scale=scale * wrong).cdf).pvalue < 1e-6


@pytest.mark.parametrize("family", LAWS)
def test_the_small_door_draws_the_same_laws(family):
    rng = KeyRing(0).numpy_generator(Purpose.NOISE, 1)
    values = draw(family, [0.5, 2.0], rng, size=(20_000, 2))
    for column, scale in zip(values.T, (0.5, 2.0), strict=True):
        assert stats.kstest(column, LAWS[family](scale=scale).cdf).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(column, LAWS[family](scale=scale * wrong).cdf).pvalue < 1e-6
    assert draw(family, [0.0, 1.0], rng)[0] == 0.0


@pytest.mark.parametrize("family", LAWS)
def test_laws_are_told_apart(family):
    other = "laplace" if family == "gaussian" else "gaussian"
    values = noise(family)[0].double().numpy()
    assert (
        stats.kstest(values, LAWS[other](scale=values.std() / LAWS[other].std()).cdf).pvalue < 1e-6
    )


def test_layers_rounds_parties_and_seeds_are_uncorrelated():
    """The same stream in two layers would have correlation 1, whatever the layers' scales are."""
    reference = noise()
    draws = {f"layer {j}": part for j, part in enumerate(reference) if len(part) >= 20_000}
    draws |= {
        "round": noise(round_=2)[0],
        "client 0": noise(party=0)[0],
        "client 1": noise(party=1)[0],
    }
    draws |= {"seed": noise(seed=1)[0]}
    matrix = np.corrcoef([part[:20_000].double().numpy() for part in draws.values()])
    assert np.abs(matrix - np.eye(len(draws))).max() < 6 / math.sqrt(20_000)
    # Shifted copies of one stream would be found too.
    a, c = draws["layer 0"].double().numpy(), draws["layer 2"].double().numpy()
    for lag in (1, 7, 8, 16, 624):
        assert abs(np.corrcoef(a[lag:20_000], c[: 20_000 - lag])[0, 1]) < 6 / math.sqrt(19_000)


def test_no_run_of_values_is_repeated():
    """Standardised values are compared in runs of four: single ones collide on the grid."""
    seen: set[bytes] = set()
    total = 0
    for round_, party, seed in (
        (1, SERVER, 0),
        (2, SERVER, 0),
        (1, 0, 0),
        (1, 1, 0),
        (2, 0, 0),
        (1, SERVER, 1),
    ):
        for part, scale in zip(noise(round_=round_, party=party, seed=seed), SIGMA, strict=True):
            steps = (
                (part / grid_step(scale) * (grid_step(scale) / scale * 512)).round().to(torch.int32)
            )
            runs = steps[: len(steps) // 4 * 4].view(-1, 4).numpy()
            total += len(runs)
            seen |= {run.tobytes() for run in runs}
    assert len(seen) == total


@pytest.mark.parametrize("family", LAWS)
def test_released_values_lie_on_the_grid(family):
    for part, scale in zip(noise(family), SIGMA, strict=True):
        step = grid_step(scale)
        assert scale / 2048 < step <= scale / 1024
        assert torch.equal(part, (part / step).round() * step)


def test_the_grid_does_not_move_the_value():
    total = torch.full((40_000,), 3.7)
    add_noise_(total, [(40_000, 0.01)], [KeyRing(0).torch_generator(Purpose.NOISE, 1)])
    assert float(total.double().mean()) == pytest.approx(3.7, abs=5 * 0.01 / 200)


def test_zero_scale_adds_nothing_and_is_not_rounded():
    total = torch.tensor([0.1, math.pi, 1e-20, 1.0])
    before = total.clone()
    streams = [KeyRing(0).torch_generator(Purpose.NOISE, j) for j in range(2)]
    add_noise_(total, [(3, 0.0), (1, 1.0)], streams)
    assert torch.equal(total[:3], before[:3])
    assert total[3] != before[3]


def untempered(word: int) -> int:
    """State word that the Mersenne Twister puts out as `word`."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    low = word
    for _ in range(5):
        low = word ^ ((low << 7) & 0x9D2C5680)
    high = low
    for _ in range(3):
        high = low ^ (high >> 11)
    return high


def test_gaussian_tails_do_not_end_where_single_precision_does():
    """Box-Muller on 24-bit uniforms ends at 5.77 standard deviations.

    Every coordinate then lacks mass 8e-9, and a neighbour's shift spread over D coordinates moves
    about 2e-8 sqrt(D) / sigma_* of it across that edge in each release: more than a usual delta
    over a training run."""
    assert largest("gaussian") > 8


def test_laplace_tails_do_not_end_there_either():
    """Exponentials of 24-bit uniforms end at 16.6."""
    assert largest("laplace") > 30


def largest(family: str) -> float:
    """Largest magnitude of unit noise from a generator whose next words have all bits set."""
    state = mt19937_state(np.full(624, untempered(2**32 - 1), dtype=np.uint32))
    state[8:12].view(torch.int32)[:] = 624  # words left before the next twist
    state[16:24].view(torch.int64)[:] = 0  # position of the next word
    generator = torch.Generator()
    generator.set_state(state)
    return float(add_noise_(torch.zeros(64), [(64, 1.0)], [generator], family).abs().max())


@pytest.mark.parametrize("family", LAWS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(2410,), (15, 1, 333), (300_001, 7)])
def test_several_vectors_become_what_each_becomes_alone(family, kind, sizes):
    """To the bit: sizes leave registers half full, redraw tails in most vectors, and exceed a
    chunk."""
    scales = (0.7, 0.0, 3.0)[: len(sizes)]
    parts = list(zip(sizes, scales, strict=True))
    start = torch.randn(5, sum(sizes), dtype=kind, generator=torch.Generator().manual_seed(0))

    def streams(row: int) -> list[torch.Generator]:
        return [KeyRing(row).torch_generator(Purpose.NOISE, j) for j in range(len(sizes))]

    alone = [
        add_noise_(vector.clone(), parts, streams(row), family) for row, vector in enumerate(start)
    ]
    together = add_noise_(
        start.clone(), parts, [one for row in range(5) for one in streams(row)], family
    )
    assert torch.equal(together, torch.stack(alone))
    assert len({vector[0].item() for vector in together - start}) == 5


def test_streams_must_fit_the_parts():
    with pytest.raises(ValueError, match="do not fit"):
        add_noise_(torch.zeros(3), [(3, 1.0)], [])
    with pytest.raises(ValueError, match="do not fit"):
        add_noise_(torch.zeros(4), [(3, 1.0)], [torch.Generator()])
    with pytest.raises(ValueError, match="do not fit"):
        add_noise_(torch.zeros(2, 3), [(3, 1.0)], [torch.Generator()])


def test_a_release_is_a_function_of_its_name():
    again = noise()
    assert all(torch.equal(a, b) for a, b in zip(noise(), again, strict=True))
    names = {
        fingerprint(KeyRing(seed), r, p) for seed in (0, 1) for r in (1, 2) for p in (SERVER, 0, 1)
    }
    assert len(names) == 12
