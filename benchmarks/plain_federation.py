"""The recipe `fashion-mnist` in plain torch: python -m benchmarks.plain_federation [--rounds T]
[--seed N] ...

Written for comparison with the simulator, from which it takes only the arrays of FashionMNIST and
the noise multiplier. It prints the test accuracy of every tenth round.
docs/results/fashion-mnist.md has the results.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.data import load
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

CLIENTS, RATE, BOUND, ALPHA, EPOCHS, LR = 500, 0.1, 0.5, 0.5, 3, 0.002


def network() -> nn.Sequential:
    """The paper's network: 26,010 parameters in four layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 2), nn.Sigmoid(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Sigmoid(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Sigmoid(), nn.Linear(32, 10),
    )  # fmt: skip


def divided(labels: np.ndarray, rng: np.random.Generator) -> list[Tensor]:
    """Indices of every client's examples: each class is cut by Dirichlet shares over all
    clients.
    """
    owner = np.empty(len(labels), dtype=int)
    for label in np.unique(labels):
        indices = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(CLIENTS, ALPHA)))[:-1] * len(indices)).astype(int)
        for client, part in enumerate(np.split(indices, cuts)):
            owner[part] = client
    return [torch.from_numpy(np.flatnonzero(owner == client)) for client in range(CLIENTS)]


def noise_scales(sizes: np.ndarray, multiplier: float) -> np.ndarray:
    """SNR-consistent noise under equal bounds: variances in proportion to s_j / sqrt(d_j), scaled
    to the multiplier.
    """
    bound = BOUND / math.sqrt(len(sizes))
    variances = bound / np.sqrt(sizes)
    return np.asarray(np.sqrt(variances * multiplier**2 * np.sum(bound**2 / variances)))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--least-pixel", type=float, default=0.0, help="pixels go from here to 1")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    rng = np.random.default_rng(given.seed)
    data = load("fashion-mnist", pixels=(given.least_pixel, 1.0))
    x, y, test_x, test_y = (
        torch.from_numpy(np.asarray(a))
        for a in (data.train_x, data.train_y, data.test_x, data.test_y)
    )
    print(f"pixels {x.min():.3f} to {x.max():.3f}")
    clients, net, loss = divided(data.train_y, rng), network(), nn.CrossEntropyLoss()
    layers = [list(module.parameters()) for module in net if list(module.parameters())]
    sizes = np.array([sum(p.numel() for p in layer) for layer in layers])
    recipe = recipes.load("fashion-mnist", [f"federation.rounds={given.rounds}"])
    sigma = noise_scales(sizes, Assembly(recipe).privacy.facts.noise_multiplier)
    for round_ in range(1, given.rounds + 1):
        start = [nn.utils.parameters_to_vector(layer).detach() for layer in layers]
        sums = [torch.zeros(int(size), dtype=torch.float64) for size in sizes]
        for client in np.flatnonzero(rng.random(CLIENTS) < RATE):
            for layer, vector in zip(layers, start, strict=True):
                nn.utils.vector_to_parameters(vector.clone(), layer)
            optimizer = torch.optim.Adam(net.parameters(), lr=LR)
            for _ in range(EPOCHS if len(clients[client]) else 0):
                for batch in clients[client][torch.randperm(len(clients[client]))].split(
                    given.batch_size
                ):
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
            print(f"round {round_}: {100 * float(right):.2f} %", flush=True)


if __name__ == "__main__":
    main()
