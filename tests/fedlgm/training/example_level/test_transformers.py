"""Per-example gradients of GPT-2 and BERT, plain and with LoRA, against autograd one example at a
time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformer_models import bert, gpt2, lora, tokens

from fedlgm.planning.layers import LayerTable
from fedlgm.training import tasks
from fedlgm.training.example_level import clipped_sum
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.models.huggingface import plain


def _one_by_one(model, x, y, task, layers):
    parameters = dict(model.named_parameters())
    rows = []
    for i in range(len(y)):
        loss = task.losses(model(*(part[i : i + 1] for part in x)), y[i : i + 1]).sum()
        found = torch.autograd.grad(
            loss, [parameters[slot.name] for slot in layers.slots()], materialize_grads=True
        )
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)


@pytest.mark.parametrize("style", ["flat", "per-layer"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("make", [gpt2, bert])
def test_sum_and_norms_are_those_of_autograd(make, adapted, style):
    model = plain(lora(make()) if adapted else make())
    task = tasks.get("causal-lm" if make is gpt2 else "classification")
    x, mask = tokens(5)
    y = torch.where(mask == 0, -100, x) if make is gpt2 else torch.tensor([0, 1, 2, 1, 0])
    layers = LayerTable.from_module(model)
    gradients = _one_by_one(model.train(), (x, mask), y, task, layers)
    norms = torch.stack([part.norm(dim=1) for part in layers.split(gradients)], dim=1)
    total, measured = clipped_sum(
        model, (x, mask), y, clip=0.05, layers=layers, task=task, style=style
    )

    torch.testing.assert_close(measured.float(), norms, rtol=1e-4, atol=1e-6)
    if style == "flat":
        expected = (gradients * (0.05 / gradients.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    else:
        factors = (0.05 / norms).clamp(max=1)
        parts = zip(layers.split(gradients), factors.unbind(1), strict=True)
        expected = torch.cat([(part * factor[:, None]).sum(0) for part, factor in parts])
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_no_layer_of_gpt2_and_bert_is_generic(recwarn):
    for make in (gpt2, bert):
        model = plain(make())
        assert ExampleGradients(model, LayerTable.from_module(model)).generic == ()


class _Positions(nn.Module):
    """Adds positions [1, length] in a way of its own."""

    def __init__(self, spread):
        super().__init__()
        self.words, self.positions, self.out = (
            nn.Embedding(7, 4),
            nn.Embedding(5, 4),
            nn.Linear(4, 3),
        )
        self.spread = spread

    def forward(self, x):
        return self.out(
            torch.tanh(self.words(x) + self.spread(self.positions(torch.arange(5)[None]))).mean(1)
        )


SPREADS = {
    "0": lambda p: p[0],
    ":1": lambda p: p[:1],
    "mean": lambda p: p.mean(0),
    "whole": lambda p: p,
}


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_shared_positions_reach_every_example_alike(spread):
    model, x, y = _Positions(spread), torch.arange(20).view(4, 5) % 7, torch.tensor([0, 1, 2, 1])
    layers = LayerTable.from_module(model)
    total, _ = clipped_sum(model, x, y, clip=1e9, layers=layers, style="flat")
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    plain_sum = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]
    )
    torch.testing.assert_close(total, plain_sum)
