"""The work that every contender does: FashionMNIST, 500 clients, 50 clients per round, the
26,010-parameter CNN.

A contender's device and number of processes come from its environment (`FEDLGM_WORK_DEVICE`,
`FEDLGM_WORK_PROCESSES`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm import data
from fedlgm.data import DataSet, Partition
from fedlgm.training import models

CLIENTS, COHORT, EPOCHS, BATCH, LR = 500, 50, 3, 32, 0.002
WORKERS = int(os.environ.get("FEDLGM_WORK_PROCESSES", "2"))
DEVICE = torch.device(os.environ.get("FEDLGM_WORK_DEVICE", "cpu"))


@lru_cache(maxsize=1)
def dataset() -> DataSet:
    return data.load("fashion-mnist")


@lru_cache(maxsize=1)
def clients() -> Partition:
    return data.partition(dataset().train_y, CLIENTS, "dirichlet", alpha=0.5)


def cohort(round: int) -> np.ndarray:
    """Return the round's 50 clients, ascending; they are the same for every contender."""
    return np.sort(np.random.default_rng(round).choice(CLIENTS, COHORT, replace=False))


def shares(round: int) -> list[np.ndarray]:
    """Divide the cohort among the processes by size, so that all have about the same amount of
    work.
    """
    members = cohort(round)
    members = members[np.argsort(-clients().sizes[members], kind="stable")]
    return [members[i::WORKERS] for i in range(WORKERS)]


def model(device: torch.device | str = DEVICE) -> nn.Module:
    return models.build("cnn", in_shape=(1, 28, 28), classes=10, activation="sigmoid").to(device)


def examples(client: int) -> tuple[Tensor, Tensor]:
    """Return a client's examples on the device."""
    index = clients()[client]
    if DEVICE.type == "cpu":
        return torch.from_numpy(dataset().train_x[index]), torch.from_numpy(
            dataset().train_y[index]
        )
    x, y = _on_the_device()
    return x[index], y[index]


@lru_cache(maxsize=1)
def _on_the_device() -> tuple[Tensor, Tensor]:
    return torch.from_numpy(dataset().train_x[:]).to(DEVICE), torch.from_numpy(
        dataset().train_y
    ).to(DEVICE)


def train(module: nn.Module, x: Tensor, y: Tensor) -> None:
    """Train a client in plain PyTorch."""
    optimizer = torch.optim.Adam(module.parameters(), lr=LR)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(y), device=y.device).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()


def serve(do_round: Callable[[int], dict[str, float] | None]) -> None:
    """Run round 0, announce readiness, and then time one round for every line of input (its
    number).

    The answer includes the round's result.
    """
    do_round(0)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        more = do_round(int(line)) or {}
        print(json.dumps({"seconds": time.perf_counter() - started, **more}), flush=True)
