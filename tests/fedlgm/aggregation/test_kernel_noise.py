"""Noise of the kernels on every backend that can run here: law, tail, names of values, grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_backends import (
    BACKENDS,
    GPU,
    INTERPRETED,
    KEY,
    SIZES,
    TRITON,
    block,
    noise,
    offsets_of,
    on,
    per_layer,
)
from scipy import stats

from fedlgm.aggregation.kernels import (
    SERVER_STREAM,
    add_noise_,
    noise_key,
    philox4x32,
)
from fedlgm.aggregation.kernels import torch_kernels as torch_backend
from fedlgm.aggregation.kernels.layout import layout_of
from fedlgm.aggregation.kernels.philox import TAIL
from fedlgm.aggregation.kernels.spec import Noise
from fedlgm.noise.draws import GRID_BITS
from fedlgm.noise.keys import KeyRing

if INTERPRETED or (GPU and TRITON):
    from fedlgm.aggregation.kernels import triton_kernels as triton_backend

TAILED = 864  # a stream with a radius in the tail
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize(("family", "law"), [("gaussian", stats.norm), ("laplace", stats.laplace)])
def test_each_layer_has_its_own_scale(backend, family, law, grid):
    sizes, scale = [4001, 3000, 4096, 2500], [0.01, 1.0, 3.0, 200.0]
    values = noise(backend, sizes, scale, family, grid=grid)
    for part, b in zip(per_layer(values, sizes), scale, strict=True):
        assert abs(part.mean()) < 4.5 * law.std() * b / math.sqrt(len(part))
        assert part.std() == pytest.approx(law.std() * b, rel=0.08)
        assert abs(stats.skew(part)) < (0.25 if family == "gaussian" else 0.7)
        assert stats.kstest(part, law(scale=b).cdf).pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(part, law(scale=wrong * b).cdf).pvalue < 1e-6


def test_streams_never_repeat_and_are_uncorrelated(backend):
    """Over layers, clients and rounds; a group of four values is compared, since single float32
    values may coincide."""
    ring, sizes = KeyRing(9), [600, 600, 600]
    rows = [
        part
        for round in (1, 2)
        for stream in (0, 1, 77, SERVER_STREAM)
        for part in per_layer(
            noise(backend, sizes, 1.0, key=noise_key(ring, round), stream=stream), sizes
        )
    ]
    table = np.stack(rows)
    groups = table.reshape(-1, 4)
    assert len(np.unique(groups, axis=0)) == len(groups)
    correlation = np.corrcoef(table) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / math.sqrt(600)
    lagged = np.corrcoef(table[:, 1:].ravel(), table[:, :-1].ravel())[0, 1]
    assert abs(lagged) < 5 / math.sqrt(table.size)


def test_a_value_depends_on_its_name_only(backend):
    """Not on the sizes of other layers, nor on its own layer's length."""
    long, short = noise(backend, [10, 3000], 1.0), noise(backend, [999, 5], 1.0)
    assert torch.equal(long[10:15], short[999:])
    assert torch.equal(long[:10], short[:10])


def test_central_values_come_from_the_documented_counter(backend):
    sizes = [9, 4, 30]
    values = noise(backend, sizes, 1.0, "laplace", stream=5)
    start = 0
    for layer, size in enumerate(sizes):
        words = [philox4x32((i // 4, layer, 5, 0), KEY)[i % 4] for i in range(size)]
        expected = [(1 if w % 2 == 0 else -1) * -math.log((w // 2 * 2 + 1) / 2**32) for w in words]
        np.testing.assert_allclose(values[start : start + size], expected, rtol=2e-6, atol=1e-7)
        start += size


def test_tail_values_come_from_the_second_counter(backend):
    """Streams that were searched for: the first word of their first counter is the one given, far
    in the tail."""
    for stream, word in ((18993048, 109), (6404258, 222), (9815417, 283)):
        words, more = (philox4x32((0, 0, stream, depth), KEY) for depth in (0, 1))
        assert words[0] == word
        u = (word // 2 * 2 + (more[0] + 0.5) / 2**31) / 2**32
        value = noise(backend, [1, 1], 1.0, "laplace", stream=stream)[0].item()
        assert value == pytest.approx((-1) ** word * -math.log(u), rel=1e-6)
        pair = noise(backend, [2], 1.0, stream=stream).double()
        assert pair.norm().item() == pytest.approx(math.sqrt(-2 * math.log(u)), rel=1e-6)
        coarse = (word // 2 * 2 + 1) / 2**32
        assert abs(math.log(u / coarse)) > 1e-4  # without the second counter both checks would fail


def test_zero_scale_leaves_every_bit(backend):
    sizes = [100, 2100, 40]
    vector = block(1, 2240)[0]
    for family in ("gaussian", "laplace"):
        scale = on(torch.tensor([1.0, 0.0, 0.5]), backend)
        noisy = add_noise_(
            on(vector.clone(), backend), offsets_of(sizes), scale, family, KEY, backend=backend
        ).cpu()
        assert torch.equal(noisy[100:2200], vector[100:2200])
        assert (noisy[:100] != vector[:100]).any()
        assert (noisy[2200:] != vector[2200:]).any()


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_released_values_lie_on_the_grid(backend, family):
    sizes, scale = [300] * 6, [1e-3, 0.7, 1.0, 1.999, 37.0, 5e8]
    vector = on(block(1, 1800)[0] * torch.tensor(scale).repeat_interleave(300), backend)
    exact = add_noise_(
        vector.clone(),
        offsets_of(sizes),
        on(torch.tensor(scale), backend),
        family,
        KEY,
        grid=False,
        backend=backend,
    )
    snapped = add_noise_(
        vector.clone(),
        offsets_of(sizes),
        on(torch.tensor(scale), backend),
        family,
        KEY,
        backend=backend,
    )
    for b, fine, coarse in zip(
        scale, per_layer(exact, sizes), per_layer(snapped, sizes), strict=True
    ):
        step = 2.0 ** (math.floor(math.log2(np.float32(b))) - GRID_BITS)
        np.testing.assert_array_equal(coarse / step, np.round(fine / step))


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_a_sum_in_float64_gets_the_same_noise_and_grid(backend, family):
    """Sums whose low bits float32 does not hold, rounded to the grid only once."""
    sizes, scale = [2500, 40, 7], [0.7, 0.0, 5e8]
    vector = 1e6 * block(1, sum(sizes))[0].double() + block(1, sum(sizes), seed=1)[0]
    there = on(torch.tensor(scale), backend)
    zero = on(torch.zeros(sum(sizes)), backend)
    unit = add_noise_(zero, offsets_of(sizes), there, family, KEY, grid=False, backend=backend)
    out = add_noise_(
        on(vector.clone(), backend), offsets_of(sizes), there, family, KEY, backend=backend
    )
    assert out.dtype == torch.float64
    expected = vector + unit.cpu().double()
    for b, exact, snapped in zip(
        scale, per_layer(expected, sizes), per_layer(out, sizes), strict=True
    ):
        step = 2.0 ** (math.floor(math.log2(np.float32(b))) - GRID_BITS) if b else 1.0
        np.testing.assert_array_equal(snapped, np.round(exact / step) * step if b else exact)


def test_large_values_survive_the_grid(backend):
    """Beyond 2^23 steps float32 has no finer values than the grid: nothing may change or
    overflow."""
    vector = torch.tensor([1e4, -3e7, 3e38, -1e30, 8191.99])
    out = add_noise_(
        on(vector.clone(), backend),
        torch.tensor([0, 5]),
        on(torch.ones(1), backend),
        "gaussian",
        KEY,
    )
    np.testing.assert_allclose(out.cpu(), vector, rtol=0, atol=7)


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_grid_closes_the_low_bits(family):
    """Outputs in (0, 1/2) off the multiples of 2^-24 prove that the value was 0 and not 1; the grid
    leaves none."""

    def proofs(value: float, grid: bool) -> float:
        vector = torch.full((200_000,), value)
        add_noise_(
            vector, torch.tensor([0, 200_000]), torch.ones(1), family, (3, int(value)), grid=grid
        )
        fine = vector * 2**24
        return ((vector > 0) & (vector < 0.5) & (fine != fine.round())).double().mean().item()

    assert proofs(0.0, grid=False) > 0.12
    assert proofs(1.0, grid=False) == 0
    assert proofs(0.0, grid=True) == proofs(1.0, grid=True) == 0


def one_step(kernels, sizes, family, **launch) -> torch.Tensor:
    updates, factors = block(3, sum(sizes)), block(3, len(sizes), seed=1)
    scale = torch.linspace(0.1, 2, len(sizes))
    device = "cuda" if GPU else "cpu"
    updates, factors, scale = updates.to(device), factors.to(device), scale.to(device)
    out = torch.ones(sum(sizes), device=device)
    spec = Noise(scale, family, KEY, grid=False, stream=TAILED)
    kernels.accumulate(out, layout_of(offsets_of(sizes)), updates, factors, spec, **launch)
    return out.cpu()


def tail_words(sizes) -> int:
    """Words below the tail's threshold that Gaussian noise for layers of these sizes draws in
    stream `TAILED`."""
    counters = [(i, layer) for layer, size in enumerate(sizes) for i in range(-(-size // 4))]
    group, layer = torch.tensor(counters).T
    return int(sum((w < TAIL).sum() for w in philox4x32((group, layer, TAILED, 0), KEY)[::2]))


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_no_bit_depends_on_the_launch(backend, family):
    if backend == "torch":
        sizes, kernels = [3, 9000, 1, 2047, 5000], torch_backend
        launches = [{"chunk": c} for c in (2048, 4096, 32768)]
    else:
        sizes, kernels = [3, 300, 1, 32, 70], triton_backend
        launches = [{"tile": t, "warps": w} for t, w in ((16, 1), (64, 2), (256, 8), (2048, 4))]
    results = [one_step(kernels, sizes, family, **launch) for launch in launches]
    assert tail_words(sizes) > 0  # the rare path is among what is compared
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", SIZES)
def test_backends_agree(backend, name, family):
    if backend == "torch":
        pytest.skip("torch is the backend to compare with")
    results = [one_step(k, SIZES[name], family) for k in (torch_backend, triton_backend)]
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-5)
