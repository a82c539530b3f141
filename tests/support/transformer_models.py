"""Small transformers with random weights: GPT-2 and BERT of two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn

import simulations
from fedlgm.training.models import task_of

WORDS, LENGTH, CLASSES = 20, 6, 3


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 12, "vocab_size": WORDS}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0, **options))


def bert(dropout: float = 0.0, **options: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    config = BertConfig(
        **sizes,
        **drops,
        vocab_size=WORDS,
        max_position_embeddings=12,
        num_labels=CLASSES,
        **options,
    )
    return BertForSequenceClassification(config)


def lora(model: nn.Module, **options: Any) -> nn.Module:
    """LoRA of rank 2 on the attention's projections (and the new head of a classifier)."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    causal = type(model).__name__.startswith("GPT2")
    where = {"target_modules": ["c_attn"]} if causal else {"target_modules": ["query", "value"]}
    kind = "CAUSAL_LM" if causal else "SEQ_CLS"
    adapted = get_peft_model(
        model, LoraConfig(r=2, lora_alpha=4, task_type=kind, **where, **options)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # they begin at zero, where half of all gradients vanish
                parameter.normal_(0, 0.1)
    return adapted


def tokens(examples: int) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask [examples, length], rows of several lengths."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(1, WORDS, (examples, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < LENGTH - torch.arange(examples)[:, None] % 3).long()
    return x * mask, mask


CHANGES = {
    "federation.rounds": 2,
    "federation.rate": 0.5,
    "privacy.delta": 0.01,
    "privacy.accountant": "rdp",
    "run.seed": 1,
    "run.workers": 1,  # a worker imports transformers, which takes longer than the run
}


def sentences(labels: bool) -> datasets.DatasetDict:
    random = np.random.default_rng(0)
    rows = [
        random.integers(1, WORDS, size=random.integers(3, LENGTH + 1)).tolist() for _ in range(60)
    ]
    table = {"input_ids": rows, "user": [f"user {i % 10}" for i in range(60)]}
    whole = datasets.Dataset.from_dict(
        table | ({"label": [sum(row) % CLASSES for row in rows]} if labels else {})
    )
    return datasets.DatasetDict(train=whole.select(range(50)), test=whole.select(range(50, 60)))


def run(model: Any, path: Path, **options: Any) -> simulations.RunResult:
    changes = CHANGES | options.pop("overrides", {})
    data = sentences(not task_of(model))
    return simulations.simulate(
        model=model, data=data, users="user", overrides=changes, run_dir=path, **options
    )
