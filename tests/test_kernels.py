"""The private step on every backend that can run here.

Triton runs compiled where there is a GPU, and otherwise in its interpreter. The interpreter must be chosen before
Triton is first imported, so `test_triton_interpreter` runs this file again in a process of its own.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from fedlgm.errors import ConfigError
from fedlgm.kernels import (
    SERVER_STREAM,
    add_noise_,
    backend_for,
    clip_scale_noise_sum,
    clip_scale_sum,
    l1_norms,
    noise_key,
    philox4x32,
    private_step,
    squared_norms,
)
from fedlgm.kernels import torch_kernels as torch_backend
from fedlgm.kernels.layout import Layout, layout_of
from fedlgm.kernels.spec import GRID_BITS, SAFETY, Noise
from fedlgm.keys import KeyRing

torch.set_num_threads(1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = importlib.util.find_spec("triton") is not None
GPU = torch.cuda.is_available() and not INTERPRETED
if INTERPRETED:
    BACKENDS = ["triton"]
elif GPU and TRITON:
    BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.gpu)]
else:
    BACKENDS = ["torch"]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

if INTERPRETED or (GPU and TRITON):
    import triton
    import triton.language as tl

    from fedlgm.kernels import triton_kernels as triton_backend
    from fedlgm.kernels.triton_noise import _gaussian_pair, _laplace, _philox

    @triton.jit
    def words_kernel(counters, out, key0, key1, N: tl.constexpr):
        i = tl.arange(0, N)
        c0, c1, c2 = tl.load(counters), tl.load(counters + 1), tl.load(counters + 2)
        k0, k1 = key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
        w0, w1, w2, w3 = _philox((c0 + i).to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), k0, k1)
        tl.store(out + 4 * i, w0.to(tl.int64))
        tl.store(out + 4 * i + 1, w1.to(tl.int64))
        tl.store(out + 4 * i + 2, w2.to(tl.int64))
        tl.store(out + 4 * i + 3, w3.to(tl.int64))

    @triton.jit
    def values_kernel(x, y, out, N: tl.constexpr):
        i = tl.arange(0, N)
        a, b = tl.load(x + i).to(tl.uint32), tl.load(y + i).to(tl.uint32)
        z0, z1 = _gaussian_pair(a, b, 1.0)
        tl.store(out + i, z0)
        tl.store(out + N + i, z1)
        tl.store(out + 2 * N + i, _laplace(a, 1.0))


KEY = (0x12345678, 0xFEDCBA98)
SIZES = {
    "odd": [7, 1, 1030, 3, 517, 2048, 1, 61],
    "one layer": [3001],
    "one element": [1],
    "aligned": [64, 2048, 4096, 16],
    "many": [1, 2, 3, 5] * 8,
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def on(tensor: torch.Tensor, backend: str) -> torch.Tensor:
    return tensor.cuda() if backend == "triton" and GPU else tensor


def offsets_of(sizes) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(sizes)])


def block(clients: int, size: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_layer(values: torch.Tensor, sizes) -> list[np.ndarray]:
    return [part.double().cpu().numpy() for part in values.split(list(sizes), dim=-1)]


# ---------------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clients", [0, 1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_norms_against_float64(backend, name, clients, dtype):
    sizes = SIZES[name]
    updates = on(block(clients, sum(sizes), dtype), backend)
    squared, nonfinite = squared_norms(updates, offsets_of(sizes), backend=backend)
    absolute, _ = l1_norms(updates, offsets_of(sizes), backend=backend)
    assert squared.shape == absolute.shape == (clients, len(sizes))
    assert nonfinite.tolist() == [0] * clients
    for k, part in enumerate(per_layer(updates, sizes)):
        np.testing.assert_allclose(squared[:, k].cpu(), (part**2).sum(1), rtol=1e-6)
        np.testing.assert_allclose(absolute[:, k].cpu(), np.abs(part).sum(1), rtol=1e-6)


def test_nonfinite_clients_are_counted(backend):
    updates = block(6, 5000)
    updates[1, 0] = math.nan
    updates[2, 4999] = math.inf
    updates[3, 10:14] = -math.inf
    updates[4, 2] = 3e19  # its square overflows float32
    _, nonfinite = squared_norms(on(updates, backend), offsets_of([1, 2999, 2000]), backend=backend)
    assert nonfinite.tolist() == [0, 1, 1, 4, 1, 0]
    _, nonfinite = l1_norms(on(updates, backend), offsets_of([5000]), backend=backend)
    assert nonfinite.tolist() == [0, 1, 1, 4, 0, 0]


# ------------------------------------------------------------------------------------------------------ scaled sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clients", [0, 1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_sum_against_float64(backend, name, clients, dtype):
    sizes = SIZES[name]
    updates, factors = block(clients, sum(sizes), dtype), block(clients, len(sizes), seed=1).abs()
    start = block(1, sum(sizes), seed=2)[0]
    out = on(start.clone(), backend)
    clip_scale_sum(on(updates, backend), offsets_of(sizes), on(factors, backend), out, backend=backend)
    spread = np.repeat(factors.double().numpy(), sizes, axis=1)
    expected = start.double().numpy() + (spread * updates.double().numpy()).sum(0)
    np.testing.assert_allclose(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert out.cpu().shape == (sum(sizes),)
    # The same operations in the same order: the same bits as multiplying and adding client by client.
    exact = start.clone()
    for client in range(clients):
        exact += factors[client].repeat_interleave(torch.tensor(sizes)) * updates[client].float()
    assert torch.equal(out.cpu(), exact)


def test_factor_zero_keeps_nan_and_inf_out(backend):
    sizes = [5, 3000, 100]
    updates, factors = block(3, 3105), torch.ones(3, 3)
    updates[1, 0], updates[1, 4000 % 3105], updates[1, 3104] = math.nan, math.inf, -math.inf
    factors[1] = 0
    out = on(torch.zeros(3105), backend)
    clip_scale_sum(on(updates, backend), offsets_of(sizes), on(factors, backend), out, backend=backend)
    assert torch.equal(out.cpu(), updates[0] + updates[2])


def test_blocks_of_clients_add_up_to_the_same_bits(backend):
    sizes = SIZES["odd"]
    updates, factors = on(block(5, sum(sizes)), backend), on(block(5, len(sizes), seed=1), backend)
    whole, parts = (on(torch.zeros(sum(sizes)), backend) for _ in range(2))
    clip_scale_sum(updates, offsets_of(sizes), factors, whole, backend=backend)
    for rows in (slice(0, 2), slice(2, 2), slice(2, 5)):
        clip_scale_sum(updates[rows], offsets_of(sizes), factors[rows], parts, backend=backend)
    assert torch.equal(whole, parts)


def test_padded_and_unaligned_rows(backend):
    sizes = SIZES["odd"]
    size = sum(sizes)
    plain = block(3, size)
    storage = on(torch.full((3 * (size + 9) + 1,), math.nan), backend)
    padded = storage[1:].view(3, size + 9)[:, :size]
    padded.copy_(plain)
    clip = on(torch.linspace(0.5, 20, len(sizes)), backend)
    results = [
        private_step(u, offsets_of(sizes), clip, clip / 8, key=KEY, backend=backend)
        for u in (on(plain, backend), padded)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ----------------------------------------------------------------------------------------------------------- noise


def noise(backend, sizes, scale, family="gaussian", key=KEY, stream=SERVER_STREAM, grid=False) -> torch.Tensor:
    vector = on(torch.zeros(sum(sizes)), backend)
    scale = on(torch.as_tensor(scale, dtype=torch.float32).expand(len(sizes)).contiguous(), backend)
    return add_noise_(vector, offsets_of(sizes), scale, family, key, stream, grid=grid, backend=backend).cpu()


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
    """Over layers, clients and rounds; a group of four values is compared, since single float32 values may coincide."""
    ring, sizes = KeyRing(9), [600, 600, 600]
    rows = [
        part
        for round in (1, 2)
        for stream in (0, 1, 77, SERVER_STREAM)
        for part in per_layer(noise(backend, sizes, 1.0, key=noise_key(ring, round), stream=stream), sizes)
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


def test_zero_scale_leaves_every_bit(backend):
    sizes = [100, 2100, 40]
    vector = block(1, 2240)[0]
    for family in ("gaussian", "laplace"):
        scale = on(torch.tensor([1.0, 0.0, 0.5]), backend)
        noisy = add_noise_(on(vector.clone(), backend), offsets_of(sizes), scale, family, KEY, backend=backend).cpu()
        assert torch.equal(noisy[100:2200], vector[100:2200])
        assert (noisy[:100] != vector[:100]).any()
        assert (noisy[2200:] != vector[2200:]).any()


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_released_values_lie_on_the_grid(backend, family):
    sizes, scale = [300] * 6, [1e-3, 0.7, 1.0, 1.999, 37.0, 5e8]
    vector = on(block(1, 1800)[0] * torch.tensor(scale).repeat_interleave(300), backend)
    exact = add_noise_(
        vector.clone(), offsets_of(sizes), on(torch.tensor(scale), backend), family, KEY, grid=False, backend=backend
    )
    snapped = add_noise_(
        vector.clone(), offsets_of(sizes), on(torch.tensor(scale), backend), family, KEY, backend=backend
    )
    for b, fine, coarse in zip(scale, per_layer(exact, sizes), per_layer(snapped, sizes), strict=True):
        step = 2.0 ** (math.floor(math.log2(np.float32(b))) - GRID_BITS)
        np.testing.assert_array_equal(coarse / step, np.round(fine / step))


def test_large_values_survive_the_grid(backend):
    """Beyond 2^23 steps float32 has no finer values than the grid: nothing may change or overflow."""
    vector = torch.tensor([1e4, -3e7, 3e38, -1e30, 8191.99])
    out = add_noise_(on(vector.clone(), backend), torch.tensor([0, 5]), on(torch.ones(1), backend), "gaussian", KEY)
    np.testing.assert_allclose(out.cpu(), vector, rtol=0, atol=7)


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_grid_closes_the_low_bits(family):
    """Outputs in (0, 1/2) off the multiples of 2^-24 prove that the value was 0 and not 1; the grid leaves none."""

    def proofs(value: float, grid: bool) -> float:
        vector = torch.full((200_000,), value)
        add_noise_(vector, torch.tensor([0, 200_000]), torch.ones(1), family, (3, int(value)), grid=grid)
        fine = vector * 2**24
        return ((vector > 0) & (vector < 0.5) & (fine != fine.round())).double().mean().item()

    assert proofs(0.0, grid=False) > 0.12
    assert proofs(1.0, grid=False) == 0
    assert proofs(0.0, grid=True) == proofs(1.0, grid=True) == 0


# ----------------------------------------------------------------------------------------------------- local trust


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_local_noise_is_each_clients_own_noise(backend, family):
    sizes = SIZES["odd"]
    size = sum(sizes)
    updates, factors = on(block(3, size), backend), on(block(3, len(sizes), seed=1).abs(), backend)
    factors[1] = 0
    updates[1] = math.nan
    scale = on(torch.linspace(0.1, 2, len(sizes)), backend)
    streams = on(torch.tensor([4, 2**32 - 2, 0]), backend)
    fused = on(torch.ones(size), backend)
    clip_scale_noise_sum(updates, offsets_of(sizes), factors, fused, scale, family, KEY, streams, backend=backend)
    steps = on(torch.ones(size), backend)
    for client in range(3):
        own = on(torch.zeros(size), backend)
        rows = slice(client, client + 1)
        clip_scale_sum(updates[rows], offsets_of(sizes), factors[rows], own, backend=backend)
        steps += add_noise_(own, offsets_of(sizes), scale, family, KEY, int(streams[client]), backend=backend)
    assert torch.equal(fused, steps)
    assert torch.isfinite(fused).all()


# ---------------------------------------------------------------------------------------------------- private step


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 3),
    st.floats(1e-6, 1e6),
    st.floats(1e-4, 1e4),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_bounded_layers_never_exceed_their_bound(sizes, clients, magnitude, bound, seed):
    updates = block(clients, sum(sizes), seed=seed) * magnitude
    clip = torch.full((len(sizes),), bound)
    for family, order in (("gaussian", 2), ("laplace", 1)):
        step = private_step(updates, offsets_of(sizes), clip, family=family)
        for k, part in enumerate(per_layer(updates, sizes)):
            for client in range(clients):
                term = np.float32(part[client]) * step.factors[client, k].numpy()
                norm = np.linalg.norm(term.astype(np.float64), order)
                assert norm <= clip[k].item()
                original = np.linalg.norm(part[client], order)
                assert norm == pytest.approx(min(original, bound), rel=2 * (1 - SAFETY))


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_private_step_is_its_parts(backend, family):
    sizes = SIZES["odd"]
    size, offsets = sum(sizes), offsets_of(sizes)
    updates = block(4, size)
    updates[2, 5] = math.nan
    updates[3] = 0
    updates = on(updates, backend)
    clip = on(torch.tensor([0.1, math.inf, 5.0, 0.0, 1e3, 1.0, 2.0, 1e-3]), backend)
    scale = on(torch.linspace(0.1, 2, len(sizes)), backend)
    step = private_step(updates, offsets, clip, scale, family=family, key=KEY, backend=backend)
    norms = squared_norms if family == "gaussian" else l1_norms
    moments, nonfinite = norms(updates, offsets, backend=backend)
    assert torch.equal(step.moments[[0, 1, 3]], moments[[0, 1, 3]])
    assert step.nonfinite.tolist() == nonfinite.tolist() == [0, 0, 1, 0]
    assert (step.factors[2] == 0).all()
    assert step.factors[3].tolist() == [1.0] * len(sizes)
    length = (moments.sqrt() if family == "gaussian" else moments)[0]
    expected = torch.where(length > clip * SAFETY, clip * SAFETY / length, 1.0)
    np.testing.assert_allclose(step.factors[0].cpu(), expected.cpu(), rtol=1e-6)
    assert step.factors[0, 1] == 1.0
    assert step.factors[0, 3] == 0.0
    total = on(torch.zeros(size), backend)
    clip_scale_sum(updates, offsets, step.factors, total, backend=backend)
    plain = private_step(updates, offsets, clip, family=family, backend=backend)
    assert torch.equal(plain.total, total)
    assert torch.equal(step.total, add_noise_(total.clone(), offsets, scale, family, KEY, backend=backend))
    carried = private_step(updates, offsets, clip, family=family, out=total.clone(), backend=backend).total
    clip_scale_sum(updates, offsets, step.factors, total, backend=backend)
    assert torch.equal(carried, total)
    streams = on(torch.arange(4), backend)
    local = private_step(updates, offsets, clip, scale, family=family, key=KEY, streams=streams, backend=backend)
    fused = on(torch.zeros(size), backend)
    clip_scale_noise_sum(updates, offsets, step.factors, fused, scale, family, KEY, streams, backend=backend)
    assert torch.equal(local.total, fused)


def test_no_clients_still_release_noise(backend):
    sizes = [30, 3]
    ones = on(torch.ones(2), backend)
    empty = on(torch.empty(0, 33), backend)
    step = private_step(empty, offsets_of(sizes), ones, ones, key=KEY, backend=backend)
    assert torch.equal(step.total.cpu(), noise(backend, sizes, 1.0, grid=True))
    assert step.factors.shape == (0, 2)


def test_a_thousand_layers():
    sizes = [1] * 400 + [17] * 400 + [2047, 2049] * 2 + [1] * 400
    scale = torch.rand(len(sizes)) + 0.5
    updates = block(2, sum(sizes))
    step = private_step(updates, offsets_of(sizes), torch.full((len(sizes),), 2.0), scale, key=KEY, grid=False)
    plain = private_step(updates, offsets_of(sizes), torch.full((len(sizes),), 2.0)).total
    z = torch.cat([(n - p) / b for n, p, b in zip(*(v.split(sizes) for v in (step.total, plain)), scale, strict=True)])
    assert stats.kstest(z.numpy(), stats.norm.cdf).pvalue > 1e-3
    firsts = z[torch.tensor([0, *np.cumsum(sizes)[:-1]])]
    assert len(firsts.unique()) == len(sizes)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=30), st.sampled_from([16, 64, 2048]))
@settings(max_examples=40, deadline=None)
def test_tiles_and_segments_cover_every_layer_once(sizes, tile):
    layout = Layout(offsets_of(sizes).numpy())
    layer_of = np.repeat(np.arange(len(sizes)), sizes)
    index_in_layer = np.concatenate([np.arange(size) for size in sizes])
    tiles = layout.tiles(tile, torch.device("cpu"))
    seen = [(k, start + i, base + i) for k, start, n, base in tiles.table.tolist() for i in range(n)]
    assert seen == list(zip(layer_of, index_in_layer, range(len(layer_of)), strict=True))
    assert (tiles.table[:, 3] % tiles.alignment == 0).all()
    assert [tiles.table[t, 1].item() for t in tiles.first[:-1]] == [0] * len(sizes)
    segments = layout.segments(4096, torch.device("cpu"))
    assert [0, *(s.stop for s in segments)] == [*(s.start for s in segments), len(layer_of)]
    for s in segments:
        assert s.stop - s.start <= 4096
        inside = slice(s.start, s.stop)
        np.testing.assert_array_equal(np.broadcast_to(s.layer, s.stop - s.start), layer_of[inside])
        if s.pick is None:
            assert s.group == index_in_layer[s.start] / 4
            assert s.group_layer == s.layer
        else:
            np.testing.assert_array_equal(s.group[s.pick // 4], index_in_layer[inside] // 4)
            np.testing.assert_array_equal(s.group_layer[s.pick // 4], layer_of[inside])
            np.testing.assert_array_equal(s.pick % 4, index_in_layer[inside] % 4)


# ------------------------------------------------------------------------------------------ launches and backends


def one_step(kernels, sizes, family, local, **launch) -> torch.Tensor:
    updates, factors = block(3, sum(sizes)), block(3, len(sizes), seed=1)
    scale = torch.linspace(0.1, 2, len(sizes))
    streams = torch.tensor([3, 1, 2]) if local else None
    device = "cuda" if GPU else "cpu"
    updates, factors, scale = updates.to(device), factors.to(device), scale.to(device)
    out = torch.ones(sum(sizes), device=device)
    spec = Noise(scale, family, KEY, grid=False, streams=None if streams is None else streams.to(device))
    kernels.accumulate(out, layout_of(offsets_of(sizes)), updates, factors, spec, **launch)
    return out.cpu()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_no_bit_depends_on_the_launch(backend, family, local):
    if backend == "torch":
        sizes, kernels = [3, 9000, 1, 2047, 5000], torch_backend
        launches = [{"chunk": c} for c in (2048, 4096, 32768)]
    else:
        sizes, kernels = [3, 300, 1, 32, 70], triton_backend
        launches = [{"tile": t, "warps": w} for t, w in ((16, 1), (64, 2), (256, 8), (2048, 4))]
    results = [one_step(kernels, sizes, family, local, **launch) for launch in launches]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", SIZES)
def test_backends_agree(backend, name, family, local):
    if backend == "torch":
        pytest.skip("torch is the backend to compare with")
    results = [one_step(k, SIZES[name], family, local) for k in (torch_backend, triton_backend)]
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-5)


def test_triton_words_and_values_at_the_edges(backend):
    if backend == "torch":
        pytest.skip("tests/test_philox.py holds these checks for torch")
    for counter in ([0, 0, 0], [2**32 - 64, 7, 0xFFFFFFFF], [123, 0x80000000, 5]):
        out = on(torch.empty(256, dtype=torch.int64), backend)
        words_kernel[(1,)](on(torch.tensor(counter), backend), out, 0x12345678, 0xFEDCBA98 - 2**32, N=64)
        expected = philox4x32((torch.arange(64) + counter[0], *counter[1:], 0), KEY)
        assert torch.equal(out.cpu().view(64, 4).T, torch.stack(expected))

    edges = torch.tensor([0, 1, 2, 3, 2**30 - 1, 2**30, 2**31, 3 * 2**30, 2**32 - 2**20, 2**32 - 2, 2**32 - 1])
    random = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, (2, 1024 - 121)))
    x, y = (torch.cat([e, r]) for e, r in zip(torch.cartesian_prod(edges, edges).T, random, strict=True))
    out = on(torch.empty(3, 1024), backend)
    values_kernel[(1,)](on(x, backend), on(y, backend), out, N=1024)
    expected = torch.stack([*torch_backend.gaussian_pair(x, y), torch_backend.laplace(x)])
    np.testing.assert_allclose(out.cpu(), expected, rtol=2e-6, atol=2e-6)
    assert (out != 0).all()
    assert torch.equal(out.cpu().signbit(), expected.signbit())


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_triton_interpreter():
    if INTERPRETED:
        pytest.skip("this is the process that it starts")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton and not compile", __file__]
    child = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout


@pytest.mark.skipif(not TRITON or INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_sum_kernel_compiles_to_wide_accesses(mode, tmp_path, monkeypatch):
    """Without any GPU: full tiles read and write 16 bytes at a time and nothing spills to local memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fedlgm.kernels.triton_kernels import SUM_TILE, _sum_kernel

    types = {"updates": "*fp32", "factors": "*fp32", "out": "*fp32", "table": "*i64", "clients": "i32", "layers": "i32"}
    types |= dict.fromkeys(("row", "stream", "key0", "key1"), "i32")
    types |= {"scales": "*fp32"} if mode else {}
    types |= {"streams": "*i64"} if mode == 2 else {}
    names = _sum_kernel.arg_names
    constants = {"TILE": SUM_TILE, "ALIGN": 4, "NOISE": mode, "LAPLACE": False, "GRID": True, "FRESH": True}
    source = ASTSource(
        _sum_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): constants.get(name) for name in names if name not in types},
        {(names.index(n),): [["tt.divisibility", 16]] for n, kind in types.items() if kind.startswith("*")},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
    assert ".local" not in ptx
    assert ("mul.wide.u32" in ptx or "mul.hi" in ptx) == (mode > 0)


# --------------------------------------------------------------------------------------------------------- errors


class Recorder(TorchDispatchMode):
    """Names of all operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_torch_backend_reads_no_value_back():
    """No operation hands a number from the device to the host, so none waits for it."""
    sizes = [3, 5000, 1]
    ones = torch.ones(3)
    with Recorder() as recorder:
        private_step(block(2, 5004), offsets_of(sizes), ones, ones, key=KEY, streams=torch.arange(2), backend="torch")
        recorded = set(recorder.names)
        ones[0].item()
    readers = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal"}
    assert not recorded & readers
    assert recorder.names & readers  # the recorder would have seen one


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_triton_backend_never_waits_for_the_device():
    sizes = [3, 5000, 1]
    ones, updates, streams = torch.ones(3, device="cuda"), block(2, 5004).cuda(), torch.arange(2, device="cuda")
    for _ in range(2):
        private_step(updates, offsets_of(sizes), ones, ones, key=KEY, streams=streams)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_backend_choice():
    assert backend_for(torch.zeros(1)) == "torch"
    with pytest.raises(ConfigError, match="known: triton, torch"):
        squared_norms(torch.zeros(1, 1), torch.tensor([0, 1]), backend="cuda")


@pytest.mark.parametrize(
    "offsets",
    [
        torch.tensor([0]),
        torch.tensor([1, 4]),
        torch.tensor([0, 2, 2, 4]),
        torch.tensor([0, 3, 2, 4]),
        torch.tensor([0, 2**31]),
        torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([[0, 4]]),
    ],
)
def test_bad_boundaries_are_refused(offsets):
    with pytest.raises(ConfigError, match="offsets must be"):
        squared_norms(torch.zeros(1, 4), offsets)


def test_bad_arguments_are_refused():
    offsets, updates, ones = torch.tensor([0, 1, 4]), torch.zeros(2, 4), torch.ones(2)
    with pytest.raises(ConfigError, match=r"updates must be float32 or bfloat16 \[clients, 4\]"):
        squared_norms(torch.zeros(2, 5), offsets)
    with pytest.raises(ConfigError, match="updates must be"):
        squared_norms(updates.double(), offsets)
    with pytest.raises(ConfigError, match="side by side"):
        squared_norms(torch.zeros(4, 2).T, offsets)
    with pytest.raises(ConfigError, match=r"factors must be contiguous torch.float32 \[2, 2\] on cpu"):
        clip_scale_sum(updates, offsets, ones, torch.zeros(4))
    with pytest.raises(ConfigError, match="out must be"):
        clip_scale_sum(updates, offsets, torch.ones(2, 2), torch.zeros(4, 2)[:, 0])
    with pytest.raises(ConfigError, match="known: gaussian, laplace"):
        add_noise_(torch.zeros(4), offsets, ones, "normal", KEY)
    with pytest.raises(ConfigError, match="key must be two words"):
        add_noise_(torch.zeros(4), offsets, ones, "gaussian", (0, 2**32))
    with pytest.raises(ConfigError, match="stream a word"):
        add_noise_(torch.zeros(4), offsets, ones, "gaussian", KEY, -1)
    with pytest.raises(ConfigError, match="scale must be"):
        add_noise_(torch.zeros(4), offsets, torch.ones(3), "gaussian", KEY)
    with pytest.raises(ConfigError, match="streams must be"):
        private_step(updates, offsets, ones, ones, key=KEY, streams=torch.arange(3))
    with pytest.raises(ConfigError, match="noise needs a key"):
        private_step(updates, offsets, ones, ones)
    with pytest.raises(ConfigError, match="clip must be"):
        private_step(updates, offsets, torch.ones(3))


def test_import_needs_neither_triton_nor_flower():
    code = (
        "import sys; sys.modules['triton'] = None; import fedlgm.kernels as k, torch; "
        "k.private_step(torch.ones(1, 2), torch.tensor([0, 2]), torch.ones(1)); "
        "assert not {'flwr', 'ray', 'opacus'} & set(sys.modules)\n"
        "try: k.squared_norms(torch.ones(1, 2), torch.tensor([0, 2]), backend='triton')\n"
        "except ValueError as error: assert 'needs the package triton' in str(error)\n"
        "else: raise SystemExit('not refused')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
