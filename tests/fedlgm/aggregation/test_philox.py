"""Philox words, their use as noise, and the keys: known answers, an independent float64 reference,
exact tails."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedlgm.aggregation.kernels import SERVER_STREAM, noise_key, philox4x32
from fedlgm.aggregation.kernels.philox import TAIL
from fedlgm.aggregation.kernels.torch_kernels import gaussian_pair, laplace, tail_uniform, uniform
from fedlgm.noise.keys import KeyRing, Purpose

torch.set_num_threads(1)

ONES = 0xFFFFFFFF
# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
word = st.integers(0, ONES)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter, key, output):
    assert philox4x32(counter, key) == output
    for dtype in (np.uint64, np.int64):
        words = philox4x32(tuple(np.array([c], dtype) for c in counter), key)
        assert tuple(int(w[0]) for w in words) == output
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == output


@given(st.lists(word, min_size=1, max_size=8), word, word, word, word)
@settings(max_examples=100, deadline=None)
def test_scalar_words_and_every_array_type_agree(groups, layer, stream, key0, key1):
    expected = [philox4x32((g, layer, stream, 0), (key0, key1)) for g in groups]
    tensors = philox4x32((torch.tensor(groups), layer, torch.tensor(stream), 0), (key0, key1))
    arrays = philox4x32((np.array(groups, np.uint64), layer, stream, 0), (key0, key1))
    assert torch.stack(tensors, 1).tolist() == [list(e) for e in expected]
    assert np.stack(arrays, 1).tolist() == [list(e) for e in expected]


def test_every_counter_word_and_key_word_changes_every_output_word():
    base = ((1, 2, 3, 4), (5, 6))
    outputs = {philox4x32(*base)}
    for i in range(4):
        outputs.add(
            philox4x32(tuple(c ^ (1 << 31) * (i == j) for j, c in enumerate(base[0])), base[1])
        )
    for i in range(2):
        outputs.add(philox4x32(base[0], tuple(k ^ (i == j) for j, k in enumerate(base[1]))))
    for column in zip(*outputs, strict=True):
        assert len(set(column)) == 7


def test_words_are_uniform_in_every_bit_and_uncorrelated_between_lanes():
    words = torch.stack(philox4x32((torch.arange(50_000), 7, 3, 0), noise_key(KeyRing(1), 2)))
    bits = (words[..., None] >> torch.arange(32)) & 1
    z = (bits.double().mean(1) - 0.5) * 2 * math.sqrt(50_000)
    assert z.abs().max() < 5
    correlation = torch.corrcoef(words.double())
    assert (correlation - torch.eye(4)).abs().max() < 5 / math.sqrt(50_000)


def test_keys_follow_ring_and_round():
    ring = KeyRing.from_seed(3)
    assert noise_key(ring, 4) == tuple(int(w) for w in ring.words(2, Purpose.NOISE, 4))
    keys = {
        noise_key(r, n)
        for r in (ring, KeyRing.from_seed(4), KeyRing.from_seed(None))
        for n in range(200)
    }
    assert len(keys) == 600
    assert all(0 <= w <= ONES for key in keys for w in key)
    assert SERVER_STREAM == ONES


def unit(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return torch.where(x < TAIL, tail_uniform(x, more), uniform(x))


def reference_uniform(x: np.ndarray, more: np.ndarray) -> np.ndarray:
    """The documented map from a word and the one that extends it to (0, 1), in float64."""
    plain = np.minimum((x // 2 * 2 + 1) / 2.0**32, 1 - 2.0**-24)
    return np.where(x < 2**16, (x // 2 * 2 + (more + 0.5) / 2.0**31) / 2.0**32, plain)


def reference_pair(u: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documented map from a uniform and a word to two normal values, in float64 and written
    without bit tricks."""
    radius = np.sqrt(-2 * np.log(u))
    low = y % 2**30
    odd = 4 * low + 2  # doubled and made odd, as 32 bits
    v = np.where(odd >= 2**31, odd - 2.0**32, odd) / 2.0**31
    quadrant = y // 2**30
    a, b = np.cos(v * np.pi / 4), np.sin(v * np.pi / 4)
    swap, sign = quadrant % 2 == 1, np.where(quadrant >= 2, -1.0, 1.0)
    return sign * radius * np.where(swap, b, a), sign * radius * np.where(swap, a, b)


POWERS = [2**k for k in (16, 29, 30, 31)]
EDGES = np.array(
    [0, 1, 2, 3, *(p - 1 for p in POWERS), *POWERS, 3 * 2**30, ONES - 256, ONES - 1, ONES]
)


def test_gaussian_map_against_float64():
    rng = np.random.default_rng(0)
    x, y, more = (
        np.concatenate([np.repeat(EDGES, len(EDGES)), rng.integers(0, 2**32, 100_000)])
        for _ in range(3)
    )
    y[: len(EDGES) ** 2] = np.tile(EDGES, len(EDGES))
    u = unit(torch.from_numpy(x), torch.from_numpy(more))
    expected_u = reference_uniform(x, more)
    np.testing.assert_allclose(u.double().numpy(), expected_u, rtol=2**-23)
    for got, expected in zip(
        gaussian_pair(u, torch.from_numpy(y)), reference_pair(expected_u, y), strict=True
    ):
        # Near u = 1 float32 holds u itself to 6e-8: the radius is then a multiple of the smallest
        # one.
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=4e-4)
        ordinary = x < 2**31
        np.testing.assert_allclose(
            got.double().numpy()[ordinary], expected[ordinary], rtol=0, atol=4e-6
        )


def test_smallest_and_largest_values():
    assert uniform(torch.tensor([0, ONES])).tolist() == [2.0**-32, 1 - 2.0**-24]
    x, more = torch.cartesian_prod(*[torch.from_numpy(EDGES)] * 2).T
    u = unit(x, more)
    assert u.min().item() == 2.0**-64
    y = torch.from_numpy(np.concatenate([EDGES, EDGES ^ (1 << 30)]))
    values = torch.cat(gaussian_pair(u.repeat_interleave(len(y)), y.repeat(len(u)))).abs()
    assert values.min().item() == pytest.approx(2.53e-13, rel=0.01)
    assert values.max().item() == pytest.approx(math.sqrt(128 * math.log(2)), rel=1e-6)
    magnitudes = laplace(u, x).abs()
    assert magnitudes.min().item() == pytest.approx(2.0**-24, rel=1e-3)
    assert magnitudes.max().item() == pytest.approx(64 * math.log(2), rel=1e-6)


@pytest.mark.parametrize("bound", [3.0, 4.0, 5.0, 7.0, 8.5])
def test_gaussian_tails(bound):
    """|z| > t needs u < exp(-t^2/2): draw only such words, so that even 8.5 sigma is seen 100,000
    times."""
    rng = np.random.default_rng(int(bound))
    limit = int(2**64 * math.exp(-(bound**2) / 2))
    bits = rng.integers(0, limit, 400_000, dtype=np.uint64)
    # Bit 0 of a word belongs to the sign of Laplace noise: the words 2 k and 2 k + 1 share an
    # interval.
    x, more = (bits >> np.uint64(33)) << np.uint64(1), (bits >> np.uint64(1)) & np.uint64(ONES)
    x, more = (torch.from_numpy(w.astype(np.int64)) for w in (x, more))
    y = torch.from_numpy(rng.integers(0, 2**32, 400_000))
    for values in gaussian_pair(unit(x, more), y):
        for side in (values > bound, values < -bound):
            share = side.double().mean().item() * limit / 2**64
            assert share == pytest.approx(stats.norm.sf(bound), rel=0.02)


def test_the_far_tail_has_the_conditional_law():
    """Among words below 64 the magnitude less 26 ln 2 is exponential; 32 bits alone would give 32
    magnitudes."""
    rng = np.random.default_rng(2)
    x, more = (
        torch.from_numpy(rng.integers(0, 64, 20_000)),
        torch.from_numpy(rng.integers(0, 2**32, 20_000)),
    )
    excess = {
        "exact": laplace(unit(x, more), x).abs().double().numpy() - 26 * math.log(2),
        "32 bits": laplace(uniform(x), x).abs().double().numpy() - 26 * math.log(2),
    }
    assert stats.kstest(excess["exact"], stats.expon.cdf).pvalue > 1e-3
    assert stats.kstest(excess["32 bits"], stats.expon.cdf).pvalue < 1e-6
    assert excess["exact"].max() > 6 * math.log(2) > excess["32 bits"].max() - 1e-3
    # The two halves of a group's angle are uniform whatever the radius is: squared radii follow the
    # same law.
    a, b = gaussian_pair(unit(x, more), torch.from_numpy(rng.integers(0, 2**32, 20_000)))
    radii = (a.double() ** 2 + b.double() ** 2).numpy() / 2 - 26 * math.log(2)
    assert stats.kstest(radii, stats.expon.cdf).pvalue > 1e-3
    assert (
        stats.kstest(a.double().numpy() / np.hypot(a, b), stats.arcsine(loc=-1, scale=2).cdf).pvalue
        > 1e-3
    )


def test_laplace_is_symmetric_with_exponential_magnitude():
    rng = np.random.default_rng(5)
    x, more = (torch.from_numpy(rng.integers(0, 2**32, 200_000)) for _ in range(2))
    x[:100_000] >>= 16  # half of them in the tail
    values = laplace(unit(x, more), x)
    np.testing.assert_array_equal(laplace(unit(x ^ 1, more), x ^ 1).numpy(), -values.numpy())
    values = values[100_000:].double().numpy()
    assert stats.kstest(values, stats.laplace.cdf).pvalue > 1e-3
    assert stats.kstest(values, stats.laplace(scale=1.02).cdf).pvalue < 1e-3
    x = torch.arange(0, 2**32, 2**14)
    tail = laplace(unit(x, torch.full_like(x, 2**31)), x)
    for bound in (3.0, 6.0, 9.0):
        assert (tail.abs() > bound).double().mean().item() == pytest.approx(
            math.exp(-bound), rel=0.03
        )
