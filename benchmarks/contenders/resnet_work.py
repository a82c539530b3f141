"""ResNet-18 (GroupNorm) on 32x32 images: 20 clients of 64 images, ten clients per round, one epoch,
batches of 32, two workers.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm import data
from fedlgm.data import DataSet, Partition
from fedlgm.training import models

CLIENTS, COHORT, IMAGES, BATCH, LR = 20, 10, 64, 32, 0.01
WORKERS = 2
spent = [0.0]  # seconds of local training in this process, for a stopwatch


@lru_cache(maxsize=1)
def dataset() -> DataSet:
    return data.synthetic(CLIENTS * IMAGES, shape=(3, 32, 32))


@lru_cache(maxsize=1)
def clients() -> Partition:
    return data.partition(dataset().train_y, CLIENTS, "iid")


def cohort(round: int) -> np.ndarray:
    return np.sort(np.random.default_rng(round).choice(CLIENTS, COHORT, replace=False))


def model() -> nn.Module:
    return models.build("resnet18", in_shape=(3, 32, 32), classes=10)


def examples(client: int) -> tuple[Tensor, Tensor]:
    index = clients()[client]
    return torch.from_numpy(dataset().train_x[index]), torch.from_numpy(dataset().train_y[index])


def train(module: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for batch in torch.randperm(len(y)).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
        optimizer.step()
