"""Initial weights from a file, under the names of the model or of the base below its adapters."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformer_models import gpt2, lora

from fedlgm.errors import ConfigError
from fedlgm.training import models
from fedlgm.training.models.adapters import adapt
from fedlgm.training.models.huggingface import plain


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.fixture
def stored(tmp_path):
    save_file(net().state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def test_a_model_and_a_base_below_adapters_take_the_same_file(stored):
    one, other = models.load_weights_(net(), stored), models.load_weights_(adapt(net(), 2), stored)
    x = torch.randn(3, 4)
    assert torch.equal(one(x), other(x))


def test_tied_weights_and_adapters_of_peft_are_found(tmp_path):
    base = gpt2()
    with torch.no_grad():
        base.transformer.wte.weight.add_(1)
    base.save_pretrained(tmp_path)
    for model in (plain(gpt2()), plain(lora(gpt2()))):
        models.load_weights_(model, tmp_path / "model.safetensors")
        found = dict(model.named_parameters())
        name = next(name for name in found if name.endswith("wte.weight"))
        assert torch.equal(found[name], base.transformer.wte.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("2.bias"), r"does not hold '2\.bias', which the model has"),
        (
            lambda state: state.update({"2.bais": torch.zeros(2)}),
            r"holds '2\.bais', which the model lacks",
        ),
        (
            lambda state: state.update({"2.bias": torch.zeros(3)}),
            r"'2\.bias' has shape \(3,\) in .* and \(2,\)",
        ),
    ],
)
def test_tensors_that_are_not_the_models_are_refused_and_nothing_is_loaded(
    change, message, tmp_path
):
    state = net().state_dict()
    change(state)
    save_file(state, tmp_path / "other.safetensors")
    model = net()
    before = model[0].weight.detach().clone()
    with pytest.raises(ConfigError, match=message):
        models.load_weights_(model, tmp_path / "other.safetensors")
    assert torch.equal(model[0].weight, before)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "none"))):
        models.load_weights_(net(), tmp_path / "none")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ConfigError, match="cannot be read as a safetensors file"):
        models.load_weights_(net(), tmp_path / "text")
