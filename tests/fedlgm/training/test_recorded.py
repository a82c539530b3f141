"""Steps recorded as a CUDA graph, on a GPU; elsewhere, what happens when a step cannot be
recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlgm.errors import Notice
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, VectorizedTrainer
from fedlgm.training.devices import exact_arithmetic
from fedlgm.training.recorded import Recorded

SIZES = (13, 8, 21, 1)
SETTINGS = LocalTraining("adam", lr=0.002, epochs=2, batch_size=8)


def module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 36, 10))


def tasks() -> list[ClientTask]:
    draw = torch.Generator().manual_seed(2)
    return [
        ClientTask(
            torch.rand(n, 1, 8, 8, generator=draw),
            torch.randint(10, (n,), generator=draw),
            torch.Generator().manual_seed(n),
            SETTINGS.epochs,
        )
        for n in SIZES
    ]


def updates(device: str, record: bool = True, width: int = 3) -> Tensor:
    made = module()
    layers = LayerTable.from_module(made)
    trainer = VectorizedTrainer(made, layers, SETTINGS, width=width, device=device)
    if not record:
        trainer._fast = None
    return torch.cat([block.cpu() for block in trainer.updates(layers.flatten(made), tasks())])


def test_a_step_that_cannot_be_recorded_is_launched_as_it_is() -> None:
    expected = updates("cpu")

    def unrecordable(*arguments: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    made = module()
    layers = LayerTable.from_module(made)
    trainer = VectorizedTrainer(made, layers, SETTINGS, width=3)
    trainer._fast = unrecordable  # type: ignore[assignment]
    with pytest.warns(
        Notice, match=r"cannot be recorded as a CUDA graph \(RuntimeError\)"
    ) as warned:
        found = torch.cat(list(trainer.updates(layers.flatten(made), tasks())))
    assert len(warned) == 1
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_have_the_bits_of_launched_ones() -> None:
    launched = updates("cuda", record=False)
    assert torch.equal(updates("cuda"), launched)
    assert not torch.equal(launched, torch.zeros_like(launched))
    assert (launched - updates("cpu")).norm() < 1e-3 * launched.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_other_shapes_are_recorded_anew_and_other_values_are_not() -> None:
    calls: list[int] = []

    def doubled(values: dict[str, Tensor], factor: Tensor) -> dict[str, Tensor]:
        calls.append(1)
        return {name: value * factor for name, value in values.items()}

    recorded, factor = Recorded(doubled), torch.tensor(2.0, device="cuda")
    with exact_arithmetic(torch.device("cuda")):
        for rows, calls_so_far in ((3, 4), (3, 4), (5, 8), (3, 12)):
            value = torch.rand(rows, device="cuda")
            assert torch.equal(recorded({"a": value}, factor)["a"], 2 * value)
            assert len(calls) == calls_so_far


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_waits_for_the_device_is_launched_and_the_device_stays_usable() -> None:
    def waits(value: Tensor) -> Tensor:
        return value * float(value.sum())

    with pytest.raises(RuntimeError):
        Recorded(waits)(torch.ones(3, device="cuda"))
    assert updates("cuda").isfinite().all()
