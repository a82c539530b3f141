"""The kernels on every backend that can run here: norms, bounds, sums, arguments."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_backends import (
    BACKENDS,
    GPU,
    INTERPRETED,
    KEY,
    SIZES,
    block,
    bounded_sum,
    noise,
    offsets_of,
    on,
    per_layer,
)
from scipy import stats

from fedlgm.aggregation.kernels import (
    add_noise_,
    backend_for,
    clip_factors,
    clip_scale_sum,
    empty_block,
)
from fedlgm.aggregation.kernels.layout import Layout, align_rows
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import SAFETY

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def moments_of(updates, offsets, family="gaussian", *, backend=None):
    """Moments and overflows alone; the factors are those of bounds that bound nothing."""
    clip = torch.full((len(offsets) - 1,), math.inf, device=updates.device)
    bounds = clip_factors(updates, offsets, clip, family, backend=backend)
    return bounds.moments, bounds.nonfinite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clients", [0, 1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_norms_against_float64(backend, name, clients, dtype):
    sizes = SIZES[name]
    updates = on(block(clients, sum(sizes), dtype), backend)
    squared, nonfinite = moments_of(updates, offsets_of(sizes), backend=backend)
    absolute, _ = moments_of(updates, offsets_of(sizes), "laplace", backend=backend)
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
    _, nonfinite = moments_of(on(updates, backend), offsets_of([1, 2999, 2000]), backend=backend)
    assert nonfinite.tolist() == [0, 1, 1, 4, 1, 0]
    _, nonfinite = moments_of(on(updates, backend), offsets_of([5000]), "laplace", backend=backend)
    assert nonfinite.tolist() == [0, 1, 1, 4, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clients", [0, 1, 3])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("total", [torch.float32, torch.float64])
def test_sum_against_float64(backend, total, name, clients, dtype):
    sizes = SIZES[name]
    updates, factors = block(clients, sum(sizes), dtype), block(clients, len(sizes), seed=1).abs()
    start = block(1, sum(sizes), seed=2)[0].to(total)
    out = on(start.clone(), backend)
    clip_scale_sum(
        on(updates, backend), offsets_of(sizes), on(factors, backend), out, backend=backend
    )
    spread = np.repeat(factors.double().numpy(), sizes, axis=1)
    expected = start.double().numpy() + (spread * updates.double().numpy()).sum(0)
    np.testing.assert_allclose(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert out.cpu().shape == (sum(sizes),)
    # The same operations in the same order: the same bits as multiplying and adding client by
    # client.
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
    clip_scale_sum(
        on(updates, backend), offsets_of(sizes), on(factors, backend), out, backend=backend
    )
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
        bounded_sum(u, offsets_of(sizes), clip, clip / 8, backend=backend)
        for u in (on(plain, backend), padded)
    ]
    (one, bounds), (other, others) = results
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(bounds, others, strict=True))


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
        factors = clip_factors(updates, offsets_of(sizes), clip, family).factors
        for k, part in enumerate(per_layer(updates, sizes)):
            for client in range(clients):
                term = np.float32(part[client]) * factors[client, k].numpy()
                norm = np.linalg.norm(term.astype(np.float64), order)
                assert norm <= clip[k].item()
                original = np.linalg.norm(part[client], order)
                assert norm == pytest.approx(min(original, bound), rel=2 * (1 - SAFETY))


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_factors_bound_every_layer(backend, family):
    sizes = SIZES["odd"]
    offsets = offsets_of(sizes)
    updates = block(4, sum(sizes))
    updates[2, 5] = math.nan
    updates[3] = 0
    updates = on(updates, backend)
    clip = on(torch.tensor([0.1, math.inf, 5.0, 0.0, 1e3, 1.0, 2.0, 1e-3]), backend)
    bounds = clip_factors(updates, offsets, clip, family, backend=backend)
    moments, nonfinite = moments_of(updates, offsets, family, backend=backend)
    assert torch.equal(bounds.moments[[0, 1, 3]], moments[[0, 1, 3]])
    assert bounds.nonfinite.tolist() == nonfinite.tolist() == [0, 0, 1, 0]
    assert (bounds.factors[2] == 0).all()
    assert torch.equal(bounds.factors[3], clip.sign())
    length = (moments.sqrt() if family == "gaussian" else moments)[0]
    expected = torch.where(length > clip * SAFETY, clip * SAFETY / length, 1.0)
    np.testing.assert_allclose(bounds.factors[0].cpu(), expected.cpu(), rtol=1e-6)
    assert bounds.factors[0, 1] == 1.0
    assert bounds.factors[0, 3] == 0.0


@pytest.mark.parametrize("size", [1, 300])
def test_factors_too_small_for_single_precision_let_nothing_through(backend, size):
    """Subnormal ones are rounded by up to their own size: layers were up to 1.9 times as long as
    their bound."""
    norms = torch.tensor(np.geomspace(1e30, 3e38, 40), dtype=torch.float32)
    updates = on(torch.cat([norms[:, None] / size] * size, dim=1).contiguous(), backend)
    # interpreted, forty take ten seconds
    for bound in np.geomspace(2.0**-36, 10.0, 10 if INTERPRETED else 40):
        clip = on(torch.tensor([bound], dtype=torch.float32), backend)
        factors = clip_factors(
            updates, offsets_of([size]), clip, "laplace", backend=backend
        ).factors
        lengths = (updates * factors).double().abs().sum(dim=1)
        assert float(lengths.max()) <= bound
    assert float(factors.min()) > 0  # for the last, largest bound


def test_a_bound_of_zero_lets_nothing_through(backend):
    """Not even numbers whose squares vanish, so that their norm is 0."""
    updates = on(torch.cat([torch.full((3, 5), 1e-23), block(3, 2)], dim=1), backend)
    total, bounds = bounded_sum(
        updates, offsets_of([5, 2]), on(torch.tensor([0.0, 1e6]), backend), backend=backend
    )
    assert bounds.factors.tolist() == [[0.0, 1.0]] * 3
    assert total[:5].tolist() == [0.0] * 5


def test_no_clients_still_release_noise(backend):
    sizes = [30, 3]
    ones = on(torch.ones(2), backend)
    empty = on(torch.empty(0, 33), backend)
    total, bounds = bounded_sum(empty, offsets_of(sizes), ones, ones, backend=backend)
    assert torch.equal(total.cpu(), noise(backend, sizes, 1.0, grid=True))
    assert bounds.factors.shape == (0, 2)


def test_a_thousand_layers_with_a_nan_client(backend):
    sizes = [1, 2, 3, 2, 1] * (20 if INTERPRETED else 200)  # interpreted, a thousand take 40 s
    offsets, clip = offsets_of(sizes), torch.full((len(sizes),), 1.5)
    updates = block(2, sum(sizes))
    updates[1, 90] = math.nan
    total, bounds = bounded_sum(on(updates, backend), offsets, on(clip, backend), backend=backend)
    assert bounds.nonfinite.tolist() == [0, 1]
    expected = [raw * min(1, 1.5 / np.linalg.norm(raw)) for raw in per_layer(updates[0], sizes)]
    np.testing.assert_allclose(total.cpu(), np.concatenate(expected), rtol=3e-5)
    if INTERPRETED:
        # half a minute more; the layer's place in the counter does not depend on how many there are
        return
    values = noise(backend, sizes, 2.0)
    assert stats.kstest(values.numpy() / 2, stats.norm.cdf).pvalue > 1e-3
    assert len(values[offsets[:-1]].unique()) == 1000


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.sampled_from([16, 64, 2048]))
@settings(max_examples=40, deadline=None)
def test_tiles_and_segments_cover_every_layer_once(sizes, tile):
    layout = Layout(offsets_of(sizes).numpy())
    layer_of = np.repeat(np.arange(len(sizes)), sizes)
    index_in_layer = np.concatenate([np.arange(size) for size in sizes])
    tiles = layout.tiles(tile, torch.device("cpu"))
    seen = [
        (k, start + i, base + i) for k, start, n, base in tiles.table.tolist() for i in range(n)
    ]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_begin_where_wide_accesses_can(dtype):
    fitting = empty_block(3, 5, dtype=dtype)
    assert fitting.shape == (3, 5)
    assert fitting.stride() == (16, 1)
    assert align_rows(fitting) is fitting
    assert align_rows(fitting[1:]).data_ptr() == fitting[1:].data_ptr()
    rows = block(4, 35, dtype)
    assert align_rows(rows[:1]).data_ptr() == rows.data_ptr()
    for elsewhere in (rows, rows[1:2], rows[:, 1:6]):
        copy = align_rows(elsewhere)
        assert torch.equal(copy, elsewhere)
        assert copy.stride(0) % 16 == 0
        assert copy.data_ptr() % (16 * elsewhere.element_size()) == 0


def test_torch_backend_reads_no_value_back():
    """On an accelerator no operation hands a number to the host: it even runs on tensors that hold
    no values."""
    sizes = [3, 5000, 1]
    with torch.device("meta"):
        updates, ones = torch.empty(2, 5004), torch.empty(3)
    for family in ("gaussian", "laplace"):
        total, _ = bounded_sum(
            updates, offsets_of(sizes), ones, ones, family=family, backend="torch"
        )
        assert total.shape == (5004,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        ones[0].item()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_triton_backend_never_waits_for_the_device():
    sizes = [3, 5000, 1]
    ones, updates = torch.ones(3, device="cuda"), block(2, 5004).cuda()
    for _ in range(2):
        bounded_sum(updates, offsets_of(sizes), ones, ones)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_backend_choice():
    assert backend_for(torch.zeros(1)) == "torch"
    with pytest.raises(ConfigError, match="known: triton, torch"):
        moments_of(torch.zeros(1, 1), torch.tensor([0, 1]), backend="cuda")


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
        moments_of(torch.zeros(1, 4), offsets)


def test_bad_arguments_are_refused():
    offsets, updates, ones = torch.tensor([0, 1, 4]), torch.zeros(2, 4), torch.ones(2)
    with pytest.raises(ConfigError, match=r"updates must be float32 or bfloat16 \[clients, 4\]"):
        moments_of(torch.zeros(2, 5), offsets)
    with pytest.raises(ConfigError, match="updates must be"):
        moments_of(updates.double(), offsets)
    with pytest.raises(ConfigError, match="side by side"):
        moments_of(torch.zeros(4, 2).T, offsets)
    with pytest.raises(
        ConfigError, match=r"factors must be contiguous torch.float32 \[2, 2\] on cpu"
    ):
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
    with pytest.raises(ConfigError, match="clip must be"):
        clip_factors(updates, offsets, torch.ones(3))
    with pytest.raises(ConfigError, match="known: gaussian, laplace"):
        clip_factors(updates, offsets, ones, "normal")


@pytest.mark.slow
def test_import_needs_neither_triton_nor_flower():
    code = (
        "import sys; sys.modules['triton'] = None; import fedlgm.aggregation.kernels as k, torch; "
        "k.clip_factors(torch.ones(1, 2), torch.tensor([0, 2]), torch.ones(1)); "
        "assert not {'flwr', 'ray', 'opacus'} & set(sys.modules)\n"
        "try: k.clip_factors(torch.ones(1, 2), torch.tensor([0, 2]), torch.ones(1), "
        "backend='triton')\n"
        "except ValueError as error: assert 'needs the package triton' in str(error)\n"
        "else: raise SystemExit('not refused')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
