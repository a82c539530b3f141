"""Time and memory of a training step of LM-DP-SGD, DP-SGD, Auto-S and DP-PSAC (Tables 7 and 8 of
the LM-DP-SGD paper).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedlgm.mechanisms.risk_aware import PublishedLMDPSGD
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.training import models
from fedlgm.training.example_level import PSAC, AutoS, ExampleGradients, FlatClip, Reweighted
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Values

NETWORKS = {
    "S-CNN": ("s-cnn", (1, 28, 28), 10, 256),
    "D-CNN": ("d-cnn", (3, 32, 32), 10, 64),
    "ResNet-18": ("resnet18", (3, 32, 32), 100, 16),
    "VGG-16": ("vgg16", (3, 64, 64), 2, 16),
}
STEPPED = ("sgd", "dp-sgd", "auto-s", "dp-psac", "lm sound", "lm published")


def one_step(network: str, style: str, turns: int = 4) -> dict[str, float]:
    """Measure the median CPU seconds of a step, and the peak memory in MB above the memory before
    the first step.

    Run it in a new process, so that the peak belongs to these steps.
    """
    torch.set_num_threads(1)
    name, shape, classes, batch = NETWORKS[network]
    module = models.build(name, in_shape=shape, classes=classes)
    layers = LayerTable.from_module(module)
    x, y = torch.randn(batch, *shape), torch.randint(classes, (batch,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    count = len(layers)
    scalings = {
        "dp-sgd": FlatClip(1.0), "auto-s": AutoS(1.0), "dp-psac": PSAC(1.0, 0.1),
        "lm sound": Reweighted(1.0, (count**-0.5 * (1 - 1e-12),) * count),
    }  # fmt: skip
    gradients = ExampleGradients(module, layers) if style != "sgd" else None
    facts = RunFacts(1.0, Sampling("poisson", batch, 1.0))
    published = PublishedLMDPSGD("lm-dp-sgd")
    times = []
    for _ in range(turns + 1):
        started = time.process_time()
        if gradients is None:
            nn.functional.cross_entropy(module(x), y).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        else:
            if style == "lm published":
                norms = gradients.sum(x, y, FlatClip(1.0)).norms.numpy()
                scaling: Any = published.scaling(
                    published.plan_from_private_norms(layers, facts, norms)
                )
            else:
                scaling = scalings[style]
            total = gradients.sum(x, y, scaling).total
            total += torch.randn(len(total))
        times.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    return {"seconds": float(np.median(times[1:])), "megabytes": peak}


def measure(store: Values) -> None:
    """Measure each network and method in a separate process."""
    for network in NETWORKS:
        for style in STEPPED:
            command = [sys.executable, "-m", __name__, network, style]
            store.get(f"step {network} {style}", lambda c=command: json.loads(
                subprocess.run(c, check=True, capture_output=True, text=True).stdout
            ))  # fmt: skip


def texts(store: Values) -> Pages:
    """Make the table of milliseconds and megabytes by network and method; a dash is a missing
    figure.
    """

    def cells(key: str, form: Callable[[float], str]) -> list[list[str]]:
        rows = []
        for network, (_, _, _, batch) in NETWORKS.items():
            found = [store.values.get(f"step {network} {style}") for style in STEPPED]
            if any(found):
                rows.append(
                    [
                        f"{network}, batch {batch}",
                        *("-" if cell is None else form(cell[key]) for cell in found),
                    ]
                )
        return rows

    header = ["SGD", "DP-SGD", "Auto-S", "DP-PSAC", "LM-DP-SGD, sound", "published"]
    times = table(["ms per step", *header], cells("seconds", lambda value: f"{1000 * value:.0f}"))
    memory = table(["peak MB", *header], cells("megabytes", lambda value: f"{value:.0f}"))
    return {"data/lm-dp-sgd.md": {"steps": f"{times}\n\n{memory}"}}


MAKER = Maker("lm-dp-sgd.json", texts, measure, Values, partial=True)

if __name__ == "__main__":
    print(json.dumps(one_step(*sys.argv[1:])))
