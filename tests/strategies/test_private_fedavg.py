"""What is wrong with the arguments of a strategy for an existing app is said before its ledger exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from strategies import PrivateFedAvg, ServerOptimizer


def strategy(ledger: Path, model: Any = None, **options: Any) -> PrivateFedAvg:
    """A strategy over ten clients."""
    model = nn.Linear(3, 2) if model is None else model
    return PrivateFedAvg(model, epsilon=8, delta=1e-5, clients=10, rounds=3, ledger=ledger, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "a model must be an nn.Module, got int"),
        ({"model": nn.Linear}, "a model must be an nn.Module, got the class Linear"),
        ({"mechanism": 3}, "a mechanism is an object .*; got int"),
        ({"mechanism": type(mechanisms.get("uniform"))}, "a mechanism is an object .*; got the class"),
        ({"optimizer": object()}, "server optimizer '<object>' has no step"),
        ({"optimizer": "adamm"}, "unknown server optimizer 'adamm'; known: sgd, momentum, adam"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy(tmp_path / "ledger.sqlite", **options)
    assert not (tmp_path / "ledger.sqlite").exists()


class Twice:
    """A step of one's own."""

    def step(self, model, mean_update):
        return model + 2 * mean_update


@pytest.mark.parametrize("optimizer", [None, "momentum", ServerOptimizer("adam", 0.1), Twice()])
def test_optimizers_by_name_and_object(optimizer: Any, tmp_path: Path) -> None:
    made = strategy(tmp_path / "ledger.sqlite", optimizer=optimizer)
    zero, mean = torch.zeros(8), torch.ones(8)
    moved = made.optimizer.step(zero, mean)
    assert moved.shape == (8,)
    assert bool((moved > 0).all())
