"""PyTorch's defaults that a program has set: no dtype and no device of tensors that it does not
name changes a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from own_objects import DATA, SMALL
from torch import nn

import simulations
from fedlgm.aggregation import kernels
from fedlgm.noise import draws as noise
from fedlgm.noise.keys import KeyRing, Purpose

DTYPES = [torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def drawn() -> list[torch.Tensor]:
    """Noise of every function that draws it on the CPU."""
    ring, sizes = KeyRing.from_seed(1), (5, 300)
    made = []
    for family in ("gaussian", "laplace"):
        streams = [ring.torch_generator(Purpose.NOISE, 1, 0, j) for j in range(2)]
        total = torch.zeros(305, dtype=torch.float64)
        made.append(noise.add_noise_(total, [(5, 0.3), (300, 2.0)], streams, family))
        values, scale = torch.zeros(305, dtype=torch.float64), torch.ones(2, dtype=torch.float32)
        key, stream = kernels.noise_key(ring, 1), kernels.SERVER_STREAM
        kernels.add_noise_(
            values,
            torch.tensor([0, 5, 305]),
            scale,
            family,
            key,
            stream,
            grid=True,
            backend="torch",
        )
        made.append(values)
    streams = [ring.torch_generator(Purpose.NOISE, 2, 0, j) for j in range(2)]
    return [*made, noise.unit_noise(sizes, streams)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_noise_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    """With bfloat16 as the default it had 8 bits, which is not the law that is charged."""
    right = drawn()
    torch.set_default_dtype(dtype)
    assert all(torch.equal(*pair) for pair in zip(right, drawn(), strict=True))


class Settled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("optimizer", "dtypes"), [("sgd", DTYPES), ("adam", DTYPES[:1])], ids=["sgd", "adam"]
)
def test_a_run_does_not_depend_on_the_defaults(
    optimizer: str, dtypes: list[torch.dtype], tmp_path: Path
) -> None:
    """It ended in "Got unsupported ScalarType BFloat16" and "Tensor.item() cannot be called on meta
    tensors"."""

    changes = [*SMALL, f"federation.server_optimizer={optimizer}"]

    def run(name: str) -> str:
        result = simulations.simulate(
            model=Settled, data=DATA, overrides=changes, run_dir=tmp_path / name
        )
        assert next(result.model().parameters()).dtype == torch.float32
        return result["model_sha256"]

    right = run("plain")
    for number, dtype in enumerate(dtypes):
        torch.set_default_dtype(dtype)
        assert run(str(number)) == right
        assert torch.get_default_dtype() == dtype
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("meta")
    assert run("meta") == right
    assert torch.get_default_device().type == "meta"
