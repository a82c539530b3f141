"""A private choice of layers against LaDP's selection at equal epsilon; second table of docs/results/adapters.md.

    python -m benchmarks.layer_choice [--write]    # continue the runs; with --write put the table into the page

A public base was trained on transposed digits; 200 clients hold upright ones and train low-rank adapters of its six
layers. Every run spends the same budget. A client sends one gradient of its examples, cut to length 1.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import simulations
from benchmarks.adapters import PAGE
from benchmarks.kept import Kept, Row
from benchmarks.pages import show, table
from fedlgm import mechanisms
from fedlgm.models.adapters import adapt
from simulations.studies.statistics import difference

KEPT = PAGE.with_name("layer-choice.json")
SEEDS, EPSILONS = (1, 2, 3), (8.0,)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "all six layers": ("snr-consistent", {}),
    "two by a noisy vote": ("layer-vote", {"winners": 2}),
    "LaDP: two of the largest norm": ("ladp", {}),
    "the first layer alone": ("snr-consistent", {}),
}


def network() -> nn.Module:
    """Six linear layers: 1, 3, 5, 7, 9 and 11."""
    hidden = [part for _ in range(5) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def base(images: np.ndarray, labels: np.ndarray) -> nn.Module:
    """The network, trained on public images [n, 8, 8]."""
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net


def setting() -> tuple[Callable[..., nn.Module], dict[str, Any], dict[int, float]]:
    """The adapted model by seed and targets, the data, and LaDP's threshold by seed, which leaves two layers."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    public, private, test = slice(0, 500), slice(500, 1500), slice(1500, None)
    weights = base(np.ascontiguousarray(images[public].transpose(0, 2, 1)), labels[public]).state_dict()

    def model(seed: int, targets: list[str] | None = None) -> nn.Module:
        net = network()
        net.load_state_dict(weights)
        return adapt(net, 4, targets, seed=seed)

    thresholds = {}
    for seed in SEEDS:
        norms = sorted(float(p.detach().norm()) for name, p in model(seed).named_parameters() if "lora_A" in name)
        thresholds[seed] = (norms[-2] + norms[-3]) / 2
    data = {"train": (images[private], labels[private]), "test": (images[test], labels[test])}
    return model, data, thresholds


def measure(method: str, epsilon: float, seed: int) -> Row:
    """One run: test accuracy, the proven epsilon, and the layers released in the last round."""
    model, data, thresholds = setting()
    name, options = METHODS[method]
    if name == "ladp":
        options = {"threshold": thresholds[seed]}
    settings = {
        "federation.clients": 200, "federation.rounds": 40, "federation.rate": 0.1, "data.partition": "iid",
        "federation.server_optimizer": "adam", "federation.server_lr": 0.01, "mechanism.group_by": "adapter",
        "trainer.name": "fedsgd", "training.lr": 1000.0, "privacy.epsilon": epsilon, "privacy.delta": 1e-3,
        "run.seed": seed, "run.evaluate_every": 40, "privacy.accountant": "rdp", "training.vectorize": "off",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = simulations.simulate(
            model=model(seed, ["1"] if method == "the first layer alone" else None),
            data=data, mechanism=mechanisms.get(name, **options), overrides=settings, engine="local",
            run_dir=Path(folder) / "run",
        )  # fmt: skip
        released = [row["layer"] for row in result.layers() if row["released"]]
    accuracy = round(100 * result.metrics["accuracy"], 2)
    return {"accuracy": accuracy, "epsilon": result.epsilon, "guarantee": result.guarantee, "released": released}


def page(kept: Kept) -> str:
    """The table: accuracies by method and epsilon, and the difference between the vote and LaDP's selection."""

    def of(method: str, epsilon: float) -> list[float]:
        return [row["accuracy"] for row in kept.find(method=method, asked=epsilon)]

    rows = []
    for method in METHODS:
        chosen = [" ".join(row["released"]) for row in kept.find(method=method, asked=EPSILONS[0])]
        cells = [f"{statistics.fmean(of(method, e)):.1f} ({', '.join(map(str, of(method, e)))})" for e in EPSILONS]
        rows.append([method, *cells, "; ".join(chosen)])
    vote, ladp = list(METHODS)[1:3]
    both = [difference(of(vote, e), of(ladp, e)) for e in EPSILONS]
    rows.append(["vote minus LaDP, 95 %", *(f"{d.mean:.1f} ({d.low:.1f} to {d.high:.1f})" for d in both), ""])
    header = ("released", *(f"accuracy at epsilon {e:g}, %" for e in EPSILONS), "layers after the vote, seeds 1; 2; 3")
    return table(header, rows)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page's table")
    kept = Kept(KEPT)
    for seed in SEEDS:
        for method in METHODS:
            for epsilon in EPSILONS:
                name = {"method": method, "asked": epsilon, "seed": seed}
                kept.keep(name, lambda of=(method, epsilon, seed): measure(*of))
    show(PAGE, {"choice": page(kept)}, parser.parse_args().write)


if __name__ == "__main__":
    main()
