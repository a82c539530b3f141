"""Triton itself: its words and values, its interpreter, what its compiler makes of the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_backends import BACKENDS, GPU, INTERPRETED, KEY, TRITON, on

from fedlgm.aggregation.kernels import philox4x32
from fedlgm.aggregation.kernels import torch_kernels as torch_backend
from fedlgm.aggregation.kernels.philox import TAIL

if INTERPRETED or (GPU and TRITON):
    import triton
    import triton.language as tl

    from fedlgm.aggregation.kernels.triton_noise import (
        _extend,
        _gaussian_pair,
        _laplace,
        _philox,
        _uniform,
    )

    @triton.jit
    def words_kernel(counters, out, key0, key1, DEPTH: tl.constexpr, N: tl.constexpr):
        i = tl.arange(0, N)
        c0, c1, c2 = tl.load(counters), tl.load(counters + 1), tl.load(counters + 2)
        k0, k1 = key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
        c0, c1, c2 = (c0 + i).to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32)
        w0, w1, w2, w3 = _philox(c0, c1, c2, DEPTH, k0, k1)
        tl.store(out + 4 * i, w0.to(tl.int64))
        tl.store(out + 4 * i + 1, w1.to(tl.int64))
        tl.store(out + 4 * i + 2, w2.to(tl.int64))
        tl.store(out + 4 * i + 3, w3.to(tl.int64))

    @triton.jit
    def values_kernel(x, y, more, out, N: tl.constexpr):
        i = tl.arange(0, N)
        a, b, c = (
            tl.load(x + i).to(tl.uint32),
            tl.load(y + i).to(tl.uint32),
            tl.load(more + i).to(tl.uint32),
        )
        u = _extend(_uniform(a), a, c)
        z0, z1 = _gaussian_pair(u, b, 1.0)
        tl.store(out + i, u)
        tl.store(out + N + i, z0)
        tl.store(out + 2 * N + i, z1)
        tl.store(out + 3 * N + i, _laplace(u, a, 1.0))


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def test_triton_words_and_values_at_the_edges(backend):
    if backend == "torch":
        pytest.skip("tests/test_philox.py holds these checks for torch")
    for counter, depth in (
        ([0, 0, 0], 0),
        ([2**32 - 64, 7, 0xFFFFFFFF], 0),
        ([123, 0x80000000, 5], 1),
    ):
        out = on(torch.empty(256, dtype=torch.int64), backend)
        words_kernel[(1,)](
            on(torch.tensor(counter), backend), out, KEY[0], KEY[1] - 2**32, DEPTH=depth, N=64
        )
        expected = philox4x32((torch.arange(64) + counter[0], *counter[1:], depth), KEY)
        assert torch.equal(out.cpu().view(64, 4).T, torch.stack(expected))

    edges = [
        0,
        1,
        2,
        3,
        2**16 - 1,
        2**16,
        2**30 - 1,
        2**30,
        2**31,
        3 * 2**30,
        2**32 - 2**20,
        2**32 - 2,
        2**32 - 1,
    ]
    edges = torch.tensor(edges)
    random = torch.from_numpy(
        np.random.default_rng(0).integers(0, 2**32, (3, 4096 - len(edges) ** 3))
    )
    x, y, more = (
        torch.cat([e, r])
        for e, r in zip(torch.cartesian_prod(edges, edges, edges).T, random, strict=True)
    )
    out = on(torch.empty(4, 4096), backend)
    values_kernel[(1,)](on(x, backend), on(y, backend), on(more, backend), out, N=4096)
    u = torch.where(x < TAIL, torch_backend.tail_uniform(x, more), torch_backend.uniform(x))
    assert torch.equal(out[0].cpu(), u)
    expected = torch.stack([*torch_backend.gaussian_pair(u, y), torch_backend.laplace(u, x)])
    np.testing.assert_allclose(out[1:].cpu(), expected, rtol=2e-6, atol=2e-6)
    assert (out != 0).all()
    assert torch.equal(out[1:].cpu().signbit(), expected.signbit())


LONG = "many or launch or thousand or padded or uncorrelated or local"


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.parametrize(
    "chosen", [pytest.param(f"not ({LONG})", id="short"), pytest.param(f"({LONG})", id="long")]
)
def test_triton_interpreter(chosen):
    if INTERPRETED:
        pytest.skip("this is the process that it starts")
    files = [
        str(Path(__file__).with_name(f"test_{name}.py"))
        for name in ("kernels", "kernel_noise", "kernel_triton", "device_sum")
    ]
    files.append(str(Path(__file__).parents[2] / "simulations/runs/test_noise_backends.py"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        f"triton and not compile and not import and {chosen}",
        *files,
    ]
    child = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert " passed" in child.stdout


@pytest.mark.skipif(not TRITON or INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.parametrize(("noisy", "laplace"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("total", "store"),
    [
        ("*fp32", "st.global.v4.b32"),
        pytest.param("*fp64", "st.global.v2.b64", marks=pytest.mark.slow),
    ],
)
def test_sum_kernel_compiles_to_wide_accesses(noisy, laplace, total, store, tmp_path, monkeypatch):
    """Without any GPU: full tiles read and write 16 bytes at a time and nothing spills to local
    memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fedlgm.aggregation.kernels.triton_kernels import SUM_TILE, _sum_kernel

    types = {
        "updates": "*fp32",
        "factors": "*fp32",
        "out": total,
        "table": "*i64",
        "clients": "i32",
        "layers": "i32",
    }
    types |= dict.fromkeys(("row", "stream", "key0", "key1"), "i32")
    types |= {"scales": "*fp32"} if noisy else {}
    names = _sum_kernel.arg_names
    constants = {"TILE": SUM_TILE, "ALIGN": 4, "NOISE": noisy, "LAPLACE": laplace, "GRID": True}
    source = ASTSource(
        _sum_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): constants.get(name) for name in names if name not in types},
        {
            (names.index(n),): [["tt.divisibility", 16]]
            for n, kind in types.items()
            if kind.startswith("*")
        },
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ld.global.v4" in ptx
    assert store in ptx
    assert ".local" not in ptx
    assert ("mul.wide.u32" in ptx or "mul.hi" in ptx) == noisy
