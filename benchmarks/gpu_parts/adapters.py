"""LoRA of models of GPT-2's kind (random weights) on a GPU, with a bound and noise for each adapter:
private rounds and private steps beside bare loops.

There are 1,000 clients with 8 sequences of 64 random tokens each. In each round 20 clients train
for one epoch in batches of 8 by SGD. The adapters have rank 8 and belong to the attention's input
projection: 294,912 trained parameters of 124 million. The bare loop trains the same clients one
after another and averages the adapters, without bounds and noise. A private step bounds the
gradient of each sequence; the plain step is SGD by autograd.
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.aggregation import kernels
from fedlgm.planning.layers import LayerTable
from fedlgm.training import tasks
from fedlgm.training.example_level import ExampleGradients, PerLayerClip
from fedlgm.training.models.huggingface import HuggingFace

LR = 0.1
Result = TypeVar("Result")


@dataclass(frozen=True)
class Scale:
    """Amount of work that is measured."""

    clients: int = 1000
    cohort: int = 20
    rounds: int = 8
    layers: int = 12
    width: int = 768
    words: int = 50257
    examples: int = 8
    tokens: int = 64


TINY = Scale(clients=12, cohort=3, rounds=3, layers=1, width=16, words=40, examples=2, tokens=6)
BILLION = Scale(clients=100, rounds=5, layers=18, width=2048)  # 1.01 billion parameters


def measure(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Measure the seconds of a private round and of a round of the bare loop, and their ratio.

    On a GPU the figures include the peaks of its memory in MiB.
    """
    module = _model(scale)
    x = np.random.default_rng(0).integers(
        scale.words, size=(scale.clients * scale.examples, scale.tokens)
    )
    private, private_mib = _peak(device, lambda: _private(device, scale, x))
    bare, bare_mib = _peak(device, lambda: _bare(device, scale, torch.from_numpy(x).to(device)))
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "clients": scale.clients,
        "cohort": scale.cohort,
        **private,
        "bare_round_s": statistics.median(bare),
        "private_over_bare": private["private_round_s"] / statistics.median(bare),
        "private_mib": private_mib,
        "bare_mib": bare_mib,
    }


def measure_steps(device: torch.device, scale: Scale, turns: int = 10) -> dict[str, Any]:
    """Measure the seconds of a private step and of a plain step on the same batch. The two steps
    alternate.

    The private step bounds each sequence's gradient, adapter by adapter, and adds noise.

    On a GPU the figures include the peak memory of each step in MiB, model included. The memory of
    the other step is freed first.
    """
    makers = {"plain": _plain_step, "private": _private_step}
    peaks = {
        name: _peak(device, partial(_warm, make, device, scale))[1] for name, make in makers.items()
    }
    steps = {name: _warm(make, device, scale) for name, make in makers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return {
        "batch": f"{scale.examples} sequences of {scale.tokens} tokens",
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "private_over_plain": statistics.median(
            a / b for a, b in zip(seconds["private"], seconds["plain"], strict=True)
        ),
        "all_seconds": seconds,
        "peak_mib": peaks,
    }


def _warm(
    make: Callable[[torch.device, Scale], Callable[[], None]], device: torch.device, scale: Scale
) -> Callable[[], None]:
    step = make(device, scale)
    for _ in range(3):
        step()
    return step


def _plain_step(device: torch.device, scale: Scale) -> Callable[[], None]:
    module = _model(scale).to(device)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer, x = torch.optim.SGD(parameters, lr=LR), _tokens(device, scale)

    def step() -> None:
        optimizer.zero_grad()
        module(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        float(parameters[0].detach().sum())  # waits for the device

    return step


def _private_step(device: torch.device, scale: Scale) -> Callable[[], None]:
    module = HuggingFace(_model(scale)).to(device)
    layers = LayerTable.from_module(module, "adapter")
    weights, x = layers.bind_(module), _tokens(device, scale)
    gradients = ExampleGradients(module, layers, tasks.get("causal-lm"))
    bounds = PerLayerClip((1 / len(layers) ** 0.5,) * len(layers))
    offsets = torch.tensor([0, *np.cumsum(layers.sizes)])
    scales = torch.full((len(layers),), 1e-3, device=device)
    numbers = itertools.count()

    def step() -> None:
        total = gradients.sum(x, x, bounds).total
        kernels.add_noise_(total, offsets, scales, "gaussian", (next(numbers), 1))
        weights.sub_(total, alpha=LR / len(x))
        float(weights[:8].sum())

    return step


def _tokens(device: torch.device, scale: Scale) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(scale.words, (scale.examples, scale.tokens)).to(device)


@lru_cache(maxsize=1)
def _built(scale: Scale) -> nn.Module:
    return adapted_gpt2(scale)


def _model(scale: Scale) -> nn.Module:
    """Return a copy of the built model, because a large model takes longer to build than to copy."""
    return copy.deepcopy(_built(scale))


def _peak(device: torch.device, work: Callable[[], Result]) -> tuple[Result, float | None]:
    """Return the result of `work()`, and the MiB by which the GPU's peak memory exceeds the memory
    in use before.
    """
    if device.type != "cuda":
        return work(), None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20


def adapted_gpt2(scale: Scale) -> nn.Module:
    """Build a causal language model of GPT-2's kind, of which only the LoRA adapters are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": scale.words,
        "n_embd": scale.width,
        "n_layer": scale.layers,
        "n_head": max(1, scale.width // 64),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    adapters = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    base: Any = GPT2LMHeadModel(GPT2Config(**options))
    adapted: nn.Module = get_peft_model(base, adapters)
    return adapted


def _private(device: torch.device, scale: Scale, x: np.ndarray) -> dict[str, Any]:
    import simulations
    from simulations.runs.folder import RunFolder

    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        result = simulations.simulate(
            model=_model(scale),
            task="causal-lm",
            data={"train": (x, x), "test": (x[: scale.examples], x[: scale.examples])},
            overrides={
                "mechanism.name": "uniform",
                "mechanism.group_by": "adapter",
                "federation.clients": scale.clients,
                "federation.rounds": scale.rounds,
                "federation.sampling": "fixed",
                "federation.rate": scale.cohort / scale.clients,
                "data.partition": "iid",
                "training.device": str(device),
                "training.optimizer": "sgd",
                "training.lr": LR,
                "training.epochs": 1,
                "training.batch_size": scale.examples,
                "privacy.delta": 0.01 / scale.clients,
                "run.evaluate_every": 1000,
                "run.checkpoint_every": 1000,
            },
            run_dir=f"{folder}/run",
            progress=lambda row: ends.append(time.perf_counter()),
        )
        chosen = RunFolder.open(result.folder).recipe().training.vectorize
    # The last round also evaluates and writes the model.
    seconds = [after - before for before, after in pairwise(ends)][:-1]
    return {
        "private_round_s": statistics.median(seconds),
        "all_private_s": seconds,
        "vectorize": chosen,
    }


def _bare(device: torch.device, scale: Scale, x: Tensor) -> list[float]:
    module = _model(scale).to(device)
    parameters = [p for p in module.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    seconds = []
    for number in range(scale.rounds):
        cohort = np.random.default_rng(number).choice(scale.clients, scale.cohort, replace=False)
        began = time.perf_counter()
        total = [torch.zeros_like(p) for p in parameters]
        for client in cohort:
            for p, value in zip(parameters, start, strict=True):
                p.data.copy_(value)
            own = x[int(client) * scale.examples :][: scale.examples]
            optimizer = torch.optim.SGD(parameters, lr=LR)
            optimizer.zero_grad()
            module(input_ids=own, labels=own).loss.backward()
            optimizer.step()
            for accumulated, p, value in zip(total, parameters, start, strict=True):
                accumulated += p.detach() - value
        for value, accumulated in zip(start, total, strict=True):
            value += accumulated / scale.cohort
        float(start[0].sum())  # waits for the device
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
