"""The models of text against torch's own layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedlgm.training.models import build
from fedlgm.training.models.text import CausalAttention, GatedUnit

TOKENS = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(2))


def text_model(name: str, seed: int = 0, classes: int = 11, length: int = 7) -> nn.Module:
    return build(name, in_shape=(length,), classes=classes, seed=seed)


def test_sizes() -> None:
    sizes = {
        name: sum(p.numel() for p in text_model(name, classes=64, length=32).parameters())
        for name in ("gru", "transformer")
    }
    assert sizes == {"gru": 20_928, "transformer": 22_336}


def test_the_unit_is_torchs_gru() -> None:
    torch.manual_seed(0)
    unit, reference = GatedUnit(4, 5), nn.GRU(4, 5, batch_first=True)
    with torch.no_grad():
        reference.weight_ih_l0.copy_(unit.input.weight)
        reference.bias_ih_l0.copy_(unit.input.bias)
        reference.weight_hh_l0.copy_(unit.hidden.weight)
        reference.bias_hh_l0.copy_(unit.hidden.bias)
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(unit(x), reference(x)[0])


def test_attention_is_torchs_causal_attention() -> None:
    torch.manual_seed(0)
    attention = CausalAttention(6, 2)
    x = torch.randn(3, 5, 6)
    query, key, value = (
        layer(x).view(3, 5, 2, 3).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attention(x), attention.mix(seen.transpose(1, 2).reshape(3, 5, 6)))


@pytest.mark.parametrize("name", ["gru", "transformer"])
def test_no_token_sees_a_later_one(name: str) -> None:
    model = text_model(name)
    changed = TOKENS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    with torch.no_grad():
        before, after = model(TOKENS), model(changed)
    assert before.shape == (3, 7, 11)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert ((before[:, 4:] - after[:, 4:]).abs().amax(dim=2) > 1e-5).all()


@pytest.mark.parametrize("name", ["gru", "transformer"])
def test_models_stack_over_clients(name: str) -> None:
    models = [text_model(name, seed) for seed in range(3)]
    parameters, _ = stack_module_state(models)  # type: ignore[arg-type]

    def loss(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return functional_call(models[0], weights, (tokens[None],)).square().mean()

    stacked = vmap(grad(loss))(parameters, TOKENS)
    for i, model in enumerate(models):
        model.zero_grad()
        model(TOKENS[i : i + 1]).square().mean().backward()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(stacked[key][i], parameter.grad, rtol=1e-4, atol=1e-7)
