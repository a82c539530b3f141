"""Objects of a user's own, as they are passed to `simulations.simulate`, and runs that stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import simulations
from fedlgm import Guarantee, Mechanism, ReleasePlan

SMALL = [
    "federation.clients=20", "federation.rounds=3", "federation.rate=0.5", "privacy.delta=0.01",
    "privacy.accountant=rdp", "run.seed=7",
]  # fmt: skip
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(200, 5)), np.arange(200) % 2
DATA = {"train": (X, Y), "test": (X[:50], Y[:50])}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@dataclass(frozen=True)
class Alike(Mechanism):
    """The same noise in every layer."""

    bound: float = 1.0

    def costs(self, layers, rounds):
        return np.full(rounds, self.bound**2)

    def plan(self, layers, facts, transcript):
        clip = np.full(len(layers), self.bound / len(layers) ** 0.5)
        return ReleasePlan(
            layers,
            clip,
            np.full(len(layers), facts.noise_multiplier),
            facts,
            Guarantee("proven", "test"),
        )


class Momentum:
    """A server step without its own state."""

    def step(self, model, mean_update):
        return model + 0.5 * mean_update


def halves(data, clients, seed):
    return np.array_split(np.arange(len(data.train_y)), clients)


OBJECTS: dict[str, Any] = {
    "model": Net,
    "data": DATA,
    "mechanism": Alike("alike", bound=0.5),
    "partition": halves,
    "server_optimizer": Momentum(),
}


def loss_of(level: float):
    def tilted(outputs, targets):
        return level * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    return tilted


def interrupted(run: Path, **objects: Any) -> Path:
    """A run that was stopped after its second round."""

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulations.simulate(**objects, overrides=SMALL, run_dir=run, progress=stop)
    return run
