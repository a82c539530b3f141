"""One contender of `benchmarks.example_level` in a separate process, which takes steps on demand
and answers with their CPU seconds.

    python -m benchmarks.contenders.example_level NETWORK CONTENDER

Every line on standard input asks for one step; the answer is
`{"seconds": ..., "peak_mb": ..., ...}`.
"""

from __future__ import annotations

import importlib
import json
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_parts.adapters import Scale, adapted_gpt2
from fedlgm.planning.layers import LayerTable
from fedlgm.training import models

LR = 0.05
CLIP = 1.0
GPT2_SMALL = Scale()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project, self.out = (
            heads,
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, positions, width = x.shape
        q, k, v = self.project(x).view(n, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, positions, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = (
            nn.LayerNorm(width),
            Attention(width, 4),
            nn.LayerNorm(width),
        )
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Causal transformer with 2 layers of width 128, on 64 tokens of a vocabulary of 2,000."""

    def __init__(self, width: int = 128, vocabulary: int = 2000, positions: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block1, self.block2 = Block(width), Block(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        waves = torch.arange(positions)[:, None] * torch.exp(
            -math.log(1e4) * torch.arange(0, width, 2) / width
        )
        self.positions = torch.cat([waves.sin(), waves.cos()], dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        return self.head(self.norm(self.block2(self.block1(x))))


class Recurrent(nn.Module):
    """PyTorch's LSTM or GRU with 128 units, whose last output is used.

    The inputs are 32 tokens of a vocabulary of 2,000.
    """

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 64)
        self.cell: nn.Module = kind(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(tokens))[0][:, -1])


class WideEmbedding(nn.Module):
    """MLP with layers of 64, 32 and 10 units, on the mean of 32 embeddings.

    The table of 20,000 embeddings holds 99.8 % of the parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20_000, 64)
        self.up, self.act, self.head = nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.act(self.up(self.embed(tokens).mean(1))))


class AdaptedGpt2(nn.Module):
    """GPT-2 small (124 million parameters, random weights) with LoRA of rank 8."""

    def __init__(self) -> None:
        super().__init__()
        self.adapted = adapted_gpt2(GPT2_SMALL)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.adapted(input_ids=tokens).logits


class MeanOverPositions:
    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.transpose(1, 2), y, reduction="none").mean(1)


def image_task(
    name: str, shape: tuple[int, int, int], batch: int
) -> tuple[nn.Module, Tensor, Tensor]:
    model = models.build(name, in_shape=shape, classes=10)
    return model, torch.randn(batch, *shape), torch.randint(10, (batch,))


def text_task(model: nn.Module, words: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    return model, torch.randint(words, (batch, 64)), torch.randint(words, (batch, 64))


def adapter_task(batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    words = GPT2_SMALL.words
    return AdaptedGpt2(), torch.randint(words, (batch, 64)), torch.randint(words, (batch, 64))


def mlp_task(batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10))
    return model, torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))


def token_task(model: nn.Module, words: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    return model, torch.randint(words, (batch, 32)), torch.randint(10, (batch,))


NETWORKS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor, Tensor]], int]] = {
    # network: builder, and the micro-batch with which the plain step is fastest
    "d-cnn-256": (lambda: image_task("d-cnn", (3, 32, 32), 256), 64),
    "mnist-cnn-64": (lambda: image_task("cnn", (1, 28, 28), 64), 64),
    "mnist-cnn-256": (lambda: image_task("cnn", (1, 28, 28), 256), 256),
    "mlp-256": (lambda: mlp_task(256), 256),
    "resnet18-32": (lambda: image_task("resnet18", (3, 32, 32), 32), 32),
    "resnet20-64": (lambda: image_task("resnet20", (3, 32, 32), 64), 64),
    "embedding-256": (lambda: token_task(WideEmbedding(), 20_000, 256), 256),
    "lstm-64": (lambda: token_task(Recurrent(nn.LSTM), 2000, 64), 64),
    "nn-gru-64": (lambda: token_task(Recurrent(nn.GRU), 2000, 64), 64),
    "gru-64": (
        lambda: text_task(models.build("gru", in_shape=(64,), classes=64), 64, 64),
        64,
    ),
    "transformer-32": (lambda: text_task(Transformer(), 2000, 32), 32),
    "gpt2-lora-8": (lambda: adapter_task(8), 8),
}


def losses_of(outputs: Tensor, y: Tensor) -> Tensor:
    if outputs.dim() == 3:
        return MeanOverPositions().losses(outputs, y)
    return nn.functional.cross_entropy(outputs, y, reduction="none")


def plain(
    model: nn.Module, x: Tensor, y: Tensor, micro: int | None, channels_last: bool
) -> Callable[[], None]:
    """Make a step of SGD by autograd: with one batch, as users write it, or with micro-batches in
    the best layout.
    """
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        size = micro or len(x)
        for low in range(0, len(x), size):
            losses_of(model(x[low : low + size]), y[low : low + size]).sum().div(len(x)).backward()
        optimizer.step()

    return step


def ours(model: nn.Module, x: Tensor, y: Tensor, style: str, variant: str) -> Callable[[], None]:
    """Make a private step.

    The variant "kernel" uses the compiled kernel. "quiet" adds no noise. "exact" adds no noise and
    sums in float64.
    """
    from fedlgm.noise.draws import add_noise_
    from fedlgm.training import tasks
    from fedlgm.training.example_level import ExampleGradients, FlatClip, PerLayerClip, Reweighted
    from fedlgm.training.example_level.native import NativeExampleGradients

    layers = LayerTable.from_module(model)
    weights = layers.bind_(model)
    task = MeanOverPositions() if y.dim() == 2 else None
    gradients: Any = ExampleGradients(model, layers, task, exact_sums=variant == "exact")
    if variant == "kernel":
        gradients = NativeExampleGradients(model, layers, tasks.get(), weights)
    k = len(layers)
    scaling = {
        "per-layer": PerLayerClip((CLIP / math.sqrt(k),) * k),
        "flat": FlatClip(CLIP),
        "lm": Reweighted(CLIP, (1 / math.sqrt(k),) * k),
    }[style]
    parts = [(int(size), CLIP) for size in layers.sizes]
    streams = [torch.Generator().manual_seed(j) for j in range(k)]

    def step() -> None:
        total = gradients.sum(x, y, scaling).total
        if variant in ("", "kernel"):
            add_noise_(total, parts, streams)
        weights.sub_(total, alpha=LR / len(x))

    return step


def opacus(model: nn.Module, x: Tensor, y: Tensor, style: str) -> Callable[[], None]:
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.layers import DPGRU, DPLSTM
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    for block in model.modules():
        if (
            type(block).__name__ == "BasicBlock"
        ):  # its `out += identity` raises under Opacus's hooks
            block.forward = partial(_block, block)
    if isinstance(model, Recurrent):  # Opacus takes no `nn.LSTM` or `nn.GRU`
        own = DPLSTM if isinstance(model.cell, nn.LSTM) else DPGRU
        model.cell = own(64, 128, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if style == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP, use_ghost_clipping=True
        )
        private = DPOptimizerFastGradientClipping(
            optimizer, noise_multiplier=1.0, max_grad_norm=CLIP, expected_batch_size=len(x)
        )
        criterion = DPLossFastGradientClipping(wrapped, private, _Criterion("mean"), "mean")

        def ghost_step() -> None:
            private.zero_grad()
            criterion(wrapped(x), y).backward()
            private.step()

        return ghost_step
    kind: Any = {"flat": DPOptimizer, "per-layer": DPPerLayerOptimizer}[style]
    tensors = sum(1 for _ in model.parameters())
    bound = CLIP if style == "flat" else [CLIP / math.sqrt(tensors)] * tensors
    wrapped = GradSampleModule(model)
    private = kind(optimizer, noise_multiplier=1.0, max_grad_norm=bound, expected_batch_size=len(x))

    def step() -> None:
        private.zero_grad()
        losses_of(wrapped(x), y).mean().backward()
        private.step()

    return step


def _block(block: Any, x: Tensor) -> Tensor:
    out = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
    return torch.relu(out + (x if block.downsample is None else block.downsample(x)))


class _Criterion:
    """Cross-entropy with the attribute that Opacus reads."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses = losses_of(outputs, y)
        return losses if self.reduction == "none" else losses.mean()


def contender(network: str, name: str) -> Callable[[], None]:
    build, micro = NETWORKS[network]
    torch.manual_seed(0)
    model, x, y = build()
    if name == "plain":
        return plain(model, x, y, None, False)
    if name == "plain-best":
        return plain(model, x, y, micro, x.dim() == 4 and "mlp" not in network)
    if name.startswith("opacus-"):
        return opacus(model, x, y, name.removeprefix("opacus-"))
    style, _, variant = name.replace("per-layer", "per_layer").partition("-")
    return ours(model, x, y, style.replace("_", "-"), variant)


def code() -> float:
    """Return the resident MB of mapped files, mainly torch's kernels, which all processes share."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssFile:"))


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Every process imports what any contender needs, so that the peaks above the imports are
    # comparable.
    for module in (
        "opacus",
        "torch._dynamo",
        "torch.optim",
        "fedlgm.training.example_level",
        "fedlgm.noise.draws",
    ):
        importlib.import_module(module)
    before, mapped = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, code()
    step = contender(*sys.argv[1:3])
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        step()
        seconds = time.process_time() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = {
            "seconds": seconds,
            "peak_mb": peak,
            "imports_mb": before,
            "code_mb": code() - mapped,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
