"""Cost of running a user's model one row at a time: `python -m benchmarks.separation [--write]`.

`MappedRows` runs the model's code under `torch.func.vmap`. The baseline calls the model once for
the whole batch, which does not prove that rows stay separate. The two alternate in one process on
one thread. A ratio is the processor time of `MappedRows` divided by the baseline's processor time
in the same turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from fedlgm.planning.layers import LayerTable
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.scaling import FlatClip
from fedlgm.training.example_level.separation import KnownLayers, MappedRows
from fedlgm.training.models import plain

PLACE = Path("docs/results/separation.json")


class Mlp(nn.Module):
    """Network with layers of 784, 256 and 10 units."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(784, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 10]."""
        out: Tensor = self.out(torch.relu(self.hidden(x.flatten(1))))
        return out


class Cnn(nn.Module):
    """Two convolutions and two linear layers, written as in most tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2 = nn.Linear(512, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 10]."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        out: Tensor = self.fc2(functional.relu(self.fc1(x.flatten(1))))
        return out


class Lstm(nn.Module):
    """An LSTM over 20 steps of 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 10]."""
        out: Tensor = self.out(self.cell(x)[0][:, -1])
        return out


class Resnet(torchvision.models.ResNet):
    """ResNet-18 with GroupNorm, as a user's class."""

    def __init__(self) -> None:
        block = torchvision.models.resnet.BasicBlock
        super().__init__(
            block,
            [2, 2, 2, 2],
            num_classes=10,
            norm_layer=lambda channels: nn.GroupNorm(16, channels),
        )


class Pooled(nn.Module):
    """Mean of a transformer's outputs over the positions."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=4,
            n_embd=128,
            n_head=4,
            n_positions=64,
            vocab_size=1000,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        )
        self.gpt2 = plain(GPT2LMHeadModel(config))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [n, 1000]."""
        out: Tensor = self.gpt2(tokens).mean(dim=1)
        return out


MODELS: dict[str, tuple[type[nn.Module], int, tuple[int, ...]]] = {
    "MLP 784-256-10": (Mlp, 256, (784,)),
    "CNN 61k": (Cnn, 64, (1, 28, 28)),
    "LSTM 32": (Lstm, 64, (20, 16)),
    "ResNet-18 GroupNorm": (Resnet, 16, (3, 32, 32)),
    "GPT-2, 4 layers of 128": (Pooled, 16, (64,)),
}


def measure(
    make: type[nn.Module], batch: int, shape: tuple[int, ...], turns: int
) -> dict[str, object]:
    """Return the ratios of the times of one model's steps, and the relative difference of the two
    sums.
    """
    torch.manual_seed(0)
    model = make().train()
    tokens = make is Pooled
    x = torch.randint(1000, (batch, *shape)) if tokens else torch.randn(batch, *shape)
    y = torch.randint(10, (batch,))
    mapped, together = (ExampleGradients(model, LayerTable.from_module(model)) for _ in range(2))
    together._separation = KnownLayers(model, together._replace_forward)
    spent: dict[str, list[float]] = {"mapped": [], "together": []}
    sums = {}
    gc.collect()
    gc.freeze()  # a collection of all imported modules would add 0.2 s to some turn
    for turn in range(turns + 1):
        for side, gradients in (("mapped", mapped), ("together", together)):
            started = time.process_time()
            sums[side] = gradients.sum(x, y, FlatClip(0.1)).total
            if turn:  # the first turn is a warm-up
                spent[side].append(time.process_time() - started)
    assert isinstance(mapped._separation, MappedRows)
    ratios = sorted(a / b for a, b in zip(*spent.values(), strict=True))
    difference = float((sums["mapped"] - sums["together"]).norm() / sums["together"].norm())
    return {
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "seconds": {side: statistics.median(values) for side, values in spent.items()},
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15, help="measured turns per model")
    parser.add_argument("--write", action="store_true", help=f"write the figures to {PLACE}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name, (make, batch, shape) in MODELS.items():
        rows.append({"model": name, "batch": batch} | measure(make, batch, shape, arguments.turns))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if arguments.write:
        found = {"torch": torch.__version__, "turns": arguments.turns, "rows": rows}
        PLACE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
