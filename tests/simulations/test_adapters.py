"""Low-rank adapters: what is trained and sent, how it is grouped, and the folder that peft reads back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformer_models import bert, gpt2, lora, run, tokens
from typer.testing import CliRunner

import simulations
from fedlgm.errors import ConfigError, RunError
from fedlgm.example_level import clipped_sum
from fedlgm.example_level.engine import ExampleGradients
from fedlgm.layers import LayerTable
from fedlgm.models.adapters import LowRank, adapt, freeze_first_factors
from fedlgm.models.requirements import Unchanged
from simulations.cli import app
from simulations.config import recipe as recipes
from simulations.deploy.server_entry import deployed
from simulations.runs.folder import RunFolder

CHANGES = {
    "federation.rounds": 2, "federation.clients": 10, "federation.rate": 0.5, "privacy.delta": 0.01,
    "privacy.accountant": "rdp", "run.seed": 1,
}  # fmt: skip


def base() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def adapted(**options) -> nn.Module:
    return adapt(base(), 2, **{"targets": ["0", "2"], "also": ["4"], "alpha": 4.0} | options)


def numbers() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    x = np.random.default_rng(0).standard_normal((80, 6)).astype(np.float32)
    return {"train": (x, np.arange(80) % 3), "test": (x[:20], np.arange(20) % 3)}


def test_an_adapted_model_begins_as_the_base_and_trains_what_was_asked_for():
    x = torch.randn(5, 6)
    torch.testing.assert_close(adapted()(x), base()(x))
    names = [name for name, p in adapted().named_parameters() if p.requires_grad]
    assert names[:2] == ["0.lora_A.weight", "0.lora_B.weight"]
    assert names[-2:] == ["4.weight", "4.bias"]
    assert next(name for name, p in adapted(style="ffa").named_parameters() if p.requires_grad) == "0.lora_B.weight"
    again = dict(adapted().named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in adapted().named_parameters())


def test_layers_are_grouped_by_adapter_factor_or_kind():
    tables = {key: LayerTable.from_module(adapted(), key) for key in ("adapter", "factor", "kind", "module")}
    assert tables["adapter"].names == ("0", "2", "4")
    assert tables["adapter"].sizes.tolist() == [2 * (6 + 8), 2 * (8 + 8), 27]
    assert tables["factor"].names == ("0.lora_A", "0.lora_B", "2.lora_A", "2.lora_B", "4") == tables["module"].names
    assert tables["kind"].names == ("A", "B", "other")
    assert tables["kind"].sizes.tolist() == [2 * (6 + 8), 2 * (8 + 8), 27]
    of_peft = LayerTable.from_module(lora(gpt2()), "adapter")
    assert [name.rpartition(".h.")[2] for name in of_peft.names] == ["0.attn.c_attn", "1.attn.c_attn"]


@pytest.mark.parametrize("group_by", ["adapter", "kind"])
def test_a_run_moves_the_adapters_and_nothing_else(group_by, tmp_path):
    changes = CHANGES | {"mechanism.group_by": group_by}
    result = simulations.simulate(model=adapted(), data=numbers(), overrides=changes, run_dir=tmp_path / "run")
    before = dict(adapted().named_parameters())
    for name, value in result.model().named_parameters():
        assert torch.equal(value, before[name]) is not before[name].requires_grad, name
    assert [row["layer"] for row in result.layers()] == list(LayerTable.from_module(adapted(), group_by).names)


def test_low_rank_layers_are_fused_at_example_level():
    model, x, y = adapted(), torch.randn(7, 6), torch.arange(7) % 3
    nn.init.normal_(model[0].lora_B.weight)
    layers = LayerTable.from_module(model)
    assert ExampleGradients(model, layers).generic == ()
    total, _ = clipped_sum(model, x, y, clip=1e9, layers=layers, style="flat")
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    plain = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in plain]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, bert])
def test_peft_reads_its_adapter_back(make, tmp_path):
    result = run(lora(make()), tmp_path / "run")
    written = result.export(tmp_path / "adapter", adapter=True)
    again = PeftModel.from_pretrained(make(), tmp_path / "adapter")
    x, mask = tokens(4)
    with torch.no_grad():
        ours, theirs = (model.eval()(input_ids=x, attention_mask=mask).logits for model in (result.model(), again))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    with safe_open(written["file"], "pt") as file:
        metadata = file.metadata()
        assert all("lora_" in key or "classifier" in key for key in load_file(written["file"]))
    assert json.loads(metadata["epsilon"]) == result.epsilon
    assert metadata["guarantee"] == result.guarantee
    assert len(metadata["base_sha256"]) == 64


def test_peft_reads_low_rank_layers_and_the_new_head(tmp_path):
    result = simulations.simulate(model=adapted(), data=numbers(), overrides=CHANGES, run_dir=tmp_path / "run")
    result.export(tmp_path / "adapter", adapter=True)
    again = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    x = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(x), result.model()(x), rtol=0, atol=1e-6)


def test_a_run_without_adapters_has_none_to_export(tmp_path):
    result = simulations.simulate(model=base(), data=numbers(), overrides=CHANGES, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="its model has no adapters"):
        result.export(tmp_path / "adapter", adapter=True)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--adapter"])
    assert done.exit_code != 0
    assert not (tmp_path / "adapter").exists()


def test_a_frozen_parameter_that_training_writes_is_seen():
    model = adapted()
    state = Unchanged(model)
    state.check()
    with torch.no_grad():
        model[0].base.weight.add_(1.0)
    with pytest.raises(ConfigError, match=r"frozen parameter '0\.base\.weight' would follow private data"):
        state.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["query"]}, r"'query' ends no name of a layer of the model; linear layers: 0, 2, 4"),
        ({"also": ["head"]}, r"'head' ends no name"),
        ({"style": "half"}, r"unknown style 'half'; known: both, ffa"),
    ],
)
def test_a_mistake_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        adapted(**options)
    with pytest.raises(ConfigError, match="must lie between 1 and 3"):
        LowRank(nn.Linear(8, 3), 4)


def test_the_first_factors_of_peft_can_be_frozen():
    names = [name for name, p in freeze_first_factors(lora(gpt2())).named_parameters() if p.requires_grad]
    assert names
    assert all("lora_B" in name for name in names)


def test_a_recipe_begins_with_the_weights_of_a_file_and_is_only_continued_with_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(base().state_dict(), "base.safetensors")
    changes = CHANGES | {"model.weights": "base.safetensors", "federation.rounds": 1}
    other = adapted()
    with torch.no_grad():
        other[0].base.weight.add_(1.0)
    result = simulations.simulate(model=other, data=numbers(), overrides=changes, run_dir=tmp_path / "run")
    assert torch.equal(result.model()[0].base.weight, base()[0].weight)
    source = RunFolder.open(tmp_path / "run").provenance.read()["sources"]["weights"]
    assert source["file"] == str(tmp_path / "base.safetensors")
    save_file({name: value + 1 for name, value in base().state_dict().items()}, "base.safetensors")
    with pytest.raises(RunError, match=r"not the weights that .*run began with|frozen|another model"):
        simulations.resume(tmp_path / "run", model=other, data=numbers())


def test_nodes_refuse_a_file_of_weights_that_they_cannot_read():
    recipe = recipes.load("nodes")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": "/base.safetensors"})})
    with pytest.raises(ConfigError, match=r"model\.weights: nodes build their models from what is installed"):
        deployed(recipe, 3)
