"""The recipe `fashion-mnist` written in plain torch, for comparison with the simulator.

Only the arrays of FashionMNIST and the noise multiplier come from the library.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.data import load
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept, Row
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

CLIENTS, RATE, BOUND, ALPHA, EPOCHS, LR, BATCH = 500, 0.1, 0.5, 0.5, 3, 0.002, 32
SETTINGS = ((100, -1.0), (300, 0.0))
"""Number of rounds and smallest pixel value of each setting."""


def network() -> nn.Sequential:
    """Build the paper's network, which has 26,010 parameters in four layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 2), nn.Sigmoid(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Sigmoid(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Sigmoid(), nn.Linear(32, 10),
    )  # fmt: skip


def divide(labels: np.ndarray, rng: np.random.Generator) -> list[Tensor]:
    """Divide each class over the clients by Dirichlet shares; return the indices of every client's
    examples, int64.

    Args:
        labels: classes of the examples, [n].
        rng: draws the shares.
    """
    owner = np.empty(len(labels), dtype=int)
    for label in np.unique(labels):
        indices = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(CLIENTS, ALPHA)))[:-1] * len(indices)).astype(int)
        for client, part in enumerate(np.split(indices, cuts)):
            owner[part] = client
    return [torch.from_numpy(np.flatnonzero(owner == client)) for client in range(CLIENTS)]


def noise_scales(sizes: np.ndarray, multiplier: float) -> np.ndarray:
    """Compute the scales of SNR-consistent noise under equal bounds. The variances are in
    proportion to s_j / sqrt(d_j), and together they have the noise multiplier.
    """
    bound = BOUND / math.sqrt(len(sizes))
    variances = bound / np.sqrt(sizes)
    return np.asarray(np.sqrt(variances * multiplier**2 * np.sum(bound**2 / variances)))


def run(rounds: int, least: float, seed: int) -> Row:
    """Train, and return the test accuracy of every tenth round in per cent; pixels range from
    `least` to 1.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    data = load("fashion-mnist", pixels=(least, 1.0))
    x, y, test_x, test_y = (
        torch.from_numpy(np.asarray(a))
        for a in (data.train_x, data.train_y, data.test_x, data.test_y)
    )
    curve: list[float] = []
    clients, net, loss = divide(data.train_y, rng), network(), nn.CrossEntropyLoss()
    layers = [list(module.parameters()) for module in net if list(module.parameters())]
    sizes = np.array([sum(p.numel() for p in layer) for layer in layers])
    recipe = recipes.load("fashion-mnist", [f"federation.rounds={rounds}"])
    sigma = noise_scales(sizes, Assembly(recipe).privacy.facts.noise_multiplier)
    for round_ in range(1, rounds + 1):
        start = [nn.utils.parameters_to_vector(layer).detach() for layer in layers]
        sums = [torch.zeros(int(size), dtype=torch.float64) for size in sizes]
        for client in np.flatnonzero(rng.random(CLIENTS) < RATE):
            for layer, vector in zip(layers, start, strict=True):
                nn.utils.vector_to_parameters(vector.clone(), layer)
            optimizer = torch.optim.Adam(net.parameters(), lr=LR)
            for _ in range(EPOCHS if len(clients[client]) else 0):
                for batch in clients[client][torch.randperm(len(clients[client]))].split(BATCH):
                    optimizer.zero_grad()
                    loss(net(x[batch]), y[batch]).backward()
                    optimizer.step()
            for total, layer, vector in zip(sums, layers, start, strict=True):
                update = (nn.utils.parameters_to_vector(layer).detach() - vector).double()
                total += update * min(
                    1.0, BOUND / math.sqrt(len(layers)) / max(float(update.norm()), 1e-12)
                )
        for total, layer, vector, scale in zip(sums, layers, start, sigma, strict=True):
            mean = (total + scale * torch.randn(len(total), dtype=torch.float64)) / (CLIENTS * RATE)
            nn.utils.vector_to_parameters(vector + mean.float(), layer)
        if round_ % 10 == 0:
            with torch.no_grad():
                right = (net(test_x).argmax(1) == test_y).double().mean()
            curve.append(round(100 * float(right), 2))
    return {"curve": curve}


def measure(store: Kept) -> None:
    """Make the runs of both settings."""
    for rounds, least in SETTINGS:
        name = {"rounds": rounds, "least": least, "seed": 1}
        store.keep(name, partial(run, rounds, least, 1))


def texts(store: Kept) -> Pages:
    """Make the table of the accuracy in the last round, its mean over the last five evaluated
    rounds and its maximum.
    """
    lines = [
        [
            f"{row['rounds']}, [{row['least']:g}, 1]",
            f"{row['curve'][-1]:.1f}",
            f"{statistics.fmean(row['curve'][-5:]):.1f}",
            f"{max(row['curve']):.1f}",
        ]
        for row in store.rows
    ]
    header = ["rounds, pixels", "last round", "mean of the last five evaluated", "highest"]
    return {"data/fashion-mnist.md": {"plain torch": table(header, lines)}}


MAKER = Maker("plain-federation.json", texts, measure)
