"""LoRA of GPT-2 (124 million parameters, random weights) on a GPU: private rounds beside a bare
loop.

1,000 clients with 8 sequences of 64 random tokens each, 20 clients a round, one epoch in batches of
8 by SGD. Rank 8 on the attention's input projection: 294,912 trained parameters. The bare loop
trains the same clients one after another and averages the adapters, without bounds and noise.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LR = 0.1


@dataclass(frozen=True)
class Scale:
    """Amount of work to measure."""

    clients: int = 1000
    cohort: int = 20
    rounds: int = 8
    layers: int = 12
    width: int = 768
    words: int = 50257
    examples: int = 8
    tokens: int = 64


TINY = Scale(clients=12, cohort=3, rounds=3, layers=1, width=16, words=40, examples=2, tokens=6)


def measure(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Seconds of a private round and of a round of the bare loop, and their ratio."""
    module = adapted_gpt2(scale)
    x = np.random.default_rng(0).integers(
        scale.words, size=(scale.clients * scale.examples, scale.tokens)
    )
    private = _private(device, scale, x)
    bare = _bare(device, scale, torch.from_numpy(x).to(device))
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "clients": scale.clients,
        "cohort": scale.cohort,
        **private,
        "bare_round_s": statistics.median(bare),
        "private_over_bare": private["private_round_s"] / statistics.median(bare),
    }


def adapted_gpt2(scale: Scale) -> nn.Module:
    """A causal language model of GPT-2's kind, of which only LoRA adapters are trained."""
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
            model=adapted_gpt2(scale),
            task="causal-lm",
            data={"train": (x, x), "test": (x[: scale.examples], x[: scale.examples])},
            overrides={
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
    module = adapted_gpt2(scale).to(device)
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
