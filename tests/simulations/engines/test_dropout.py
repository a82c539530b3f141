"""Models with dropout: one model from every engine, after an interruption too, and evaluation
without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import simulations
from fedlgm.errors import ConfigError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((200, 6)).astype(np.float32)
DATA = {"train": (X, (X[:, 0] > 0).astype(int)), "test": (X[:50], (X[:50, 0] > 0).astype(int))}
SMALL = (
    *("federation.clients=12", "federation.rounds=3", "federation.rate=0.5", "data.partition=iid"),
    *(
        "training.epochs=2",
        "training.batch_size=4",
        "privacy.accountant=rdp",
        "run.block_size=3",
        "run.seed=7",
    ),
)


class Net(nn.Module):
    """Dropout as a layer, as a function and inside a layer of PyTorch's own."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.first, self.drop, self.rate = nn.Linear(6, 8), nn.Dropout(rate), rate
        self.series, self.last = (
            nn.GRU(4, 4, num_layers=2, dropout=rate, batch_first=True),
            nn.Linear(4, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.first(x))).view(-1, 2, 4)
        return self.last(
            nn.functional.dropout(self.series(hidden)[0][:, -1], self.rate, self.training)
        )


def run(
    path: Path, engine: Any = "local", *more: str, rate: float = 0.3, **options: Any
) -> simulations.RunResult:
    torch.manual_seed(1)
    net = Net(rate)
    return simulations.simulate(
        model=net, data=DATA, overrides=[*SMALL, *more], engine=engine, run_dir=str(path), **options
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> simulations.RunResult:
    return run(tmp_path_factory.mktemp("one") / "run")


def test_a_run_repeats_and_dropout_changes_it(one: simulations.RunResult, tmp_path: Path) -> None:
    again, without = run(tmp_path / "2"), run(tmp_path / "3", rate=0.0)
    assert one["model_sha256"] == again["model_sha256"] != without["model_sha256"]
    assert one.accuracy == again.accuracy


def test_worker_processes_give_the_same_bits(one: simulations.RunResult, tmp_path: Path) -> None:
    """Ray's and Flower's do, too: see `test_engines_agree_on_a_users_own`."""
    other = run(tmp_path / "1", "processes", workers=2)
    assert other["model_sha256"] == one["model_sha256"]


def test_many_clients_at_once_is_one_message_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"use training\.vectorize = 'off'"):
        run(tmp_path / "1", "local", "training.vectorize=on")
    assert not (tmp_path / "1").exists()


def test_single_examples_are_not_protected_with_it(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="drops units at random, which is not supported where single examples"
    ):
        simulations.simulate(
            "dp-sgd-digits",
            model=nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)),
            run_dir=str(tmp_path / "1"),
        )
    assert not (tmp_path / "1").exists()
