"""Low-rank adapters: what is trained and sent, how it is grouped, and the folder that peft reads
back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformer_models import bert, gpt2, lora, run, tokens
from typer.testing import CliRunner

import simulations
from fedlgm import Sampling, mechanisms
from fedlgm.errors import ConfigError, Notice, RunError
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable, factor_of
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training import (
    ClientTask,
    FedProx,
    LocalTraining,
    NativeTrainer,
    SequentialTrainer,
    VectorizedTrainer,
    models,
)
from fedlgm.training.example_level import clipped_sum
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.fedsgd import FedSGD
from fedlgm.training.models.adapters import LowRank, adapt, freeze_first_factors
from fedlgm.training.models.requirements import Unchanged
from fedlgm.training.native import reason
from fedlgm_nodes.deploy.server_entry import recipe_for_nodes, work_of
from simulations.cli import app
from simulations.config import recipe as recipes
from simulations.config.fingerprints import fixed_digest
from simulations.pretrain import pretrain
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
    assert (
        next(name for name, p in adapted(style="ffa").named_parameters() if p.requires_grad)
        == "0.lora_B.weight"
    )
    again = dict(adapted().named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in adapted().named_parameters())


def test_layers_are_grouped_by_adapter_factor_or_kind():
    tables = {
        key: LayerTable.from_module(adapted(), key)
        for key in ("adapter", "factor", "kind", "module")
    }
    assert tables["adapter"].names == ("0", "2", "4")
    assert tables["adapter"].sizes.tolist() == [2 * (6 + 8), 2 * (8 + 8), 27]
    assert (
        tables["factor"].names
        == ("0.lora_A", "0.lora_B", "2.lora_A", "2.lora_B", "4")
        == tables["module"].names
    )
    assert tables["kind"].names == ("A", "B", "other")
    assert tables["kind"].sizes.tolist() == [2 * (6 + 8), 2 * (8 + 8), 27]
    of_peft = LayerTable.from_module(lora(gpt2()), "adapter")
    assert [name.rpartition(".h.")[2] for name in of_peft.names] == [
        "0.attn.c_attn",
        "1.attn.c_attn",
    ]


@pytest.mark.parametrize("group_by", ["adapter", "kind"])
def test_a_run_moves_the_adapters_and_nothing_else(group_by, tmp_path):
    changes = CHANGES | {"mechanism.group_by": group_by}
    result = simulations.simulate(
        model=adapted(), data=numbers(), overrides=changes, run_dir=tmp_path / "run"
    )
    before = dict(adapted().named_parameters())
    for name, value in result.model().named_parameters():
        assert torch.equal(value, before[name]) is not before[name].requires_grad, name
    assert [row["layer"] for row in result.layers()] == list(
        LayerTable.from_module(adapted(), group_by).names
    )


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
    from peft import PeftModel

    result = run(lora(make()), tmp_path / "run")
    written = result.export(tmp_path / "adapter", adapter=True)
    again = PeftModel.from_pretrained(make(), tmp_path / "adapter")
    x, mask = tokens(4)
    with torch.no_grad():
        ours, theirs = (
            model.eval()(input_ids=x, attention_mask=mask).logits
            for model in (result.model(), again)
        )
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    with safe_open(written["file"], "pt") as file:
        metadata = file.metadata()
        assert all("lora_" in key or "classifier" in key for key in load_file(written["file"]))
    assert json.loads(metadata["epsilon"]) == result.epsilon
    assert metadata["guarantee"] == result.guarantee
    assert len(metadata["base_sha256"]) == 64


def test_peft_reads_low_rank_layers_and_the_new_head(tmp_path):
    from peft import PeftModel

    result = simulations.simulate(
        model=adapted(), data=numbers(), overrides=CHANGES, run_dir=tmp_path / "run"
    )
    result.export(tmp_path / "adapter", adapter=True)
    with pytest.raises(
        RunError,
        match=r"cannot write the adapter into .*: a file has the name of a folder, .*; choose another folder",
    ):
        result.export(tmp_path / "adapter" / "adapter_config.json", adapter=True)
    again = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    x = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(x), result.model()(x), rtol=0, atol=1e-6)


def test_a_run_without_adapters_has_none_to_export(tmp_path):
    result = simulations.simulate(
        model=base(), data=numbers(), overrides=CHANGES, run_dir=tmp_path / "run"
    )
    with pytest.raises(ConfigError, match="its model has no adapters"):
        result.export(tmp_path / "adapter", adapter=True)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--adapter"])
    assert done.exit_code != 0
    assert not (tmp_path / "adapter").exists()


def test_adapters_whose_scale_is_not_known_are_not_exported(tmp_path):
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.lora_A, self.lora_B = nn.Linear(6, 3), nn.Linear(6, 2), nn.Linear(2, 3)
            self.base.requires_grad_(False)

        def forward(self, x):
            return self.base(x) + 0.1 * self.lora_B(self.lora_A(x))

    result = simulations.simulate(
        model=Foreign(), data=numbers(), overrides=CHANGES, run_dir=tmp_path / "run"
    )
    with pytest.raises(
        ConfigError, match=r"run: the scale .* belong neither to peft nor to .*LowRank"
    ):
        result.export(tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()


def test_a_frozen_parameter_that_training_writes_is_seen():
    model = adapted()
    state = Unchanged(model)
    state.check()
    with torch.no_grad():
        model[0].base.weight.add_(1.0)
    with pytest.raises(
        ConfigError, match=r"frozen parameter '0\.base\.weight' would follow private data"
    ):
        state.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"targets": ["query"]},
            r"no layer of the model has a name that ends in 'query'; linear layers: 0, 2, 4",
        ),
        ({"also": ["head"]}, r"a name that ends in 'head'"),
        ({"style": "half"}, r"unknown style 'half'; known: both, ffa"),
    ],
)
def test_a_mistake_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        adapted(**options)
    with pytest.raises(ConfigError, match="must lie between 1 and 3"):
        LowRank(nn.Linear(8, 3), 4)


def test_the_first_factors_of_peft_can_be_frozen():
    names = [
        name for name, p in freeze_first_factors(lora(gpt2())).named_parameters() if p.requires_grad
    ]
    assert names
    assert all("lora_B" in name for name in names)


def test_a_recipe_begins_with_the_weights_of_a_file_and_is_only_continued_with_them(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    save_file(base().state_dict(), "base.safetensors")
    changes = CHANGES | {"model.weights": "base.safetensors", "federation.rounds": 1}
    other = adapted()
    with torch.no_grad():
        other[0].base.weight.add_(1.0)
    result = simulations.simulate(
        model=other, data=numbers(), overrides=changes, run_dir=tmp_path / "run"
    )
    assert torch.equal(result.model()[0].base.weight, base()[0].weight)
    source = RunFolder.open(tmp_path / "run").provenance.read()["sources"]["weights"]
    assert source["file"] == str(tmp_path / "base.safetensors")
    save_file({name: value + 1 for name, value in base().state_dict().items()}, "base.safetensors")
    with pytest.raises(
        RunError, match=r"not the weights that .*run began with|frozen|another model"
    ):
        simulations.resume(tmp_path / "run", model=other, data=numbers())


def test_nodes_get_the_hash_of_the_base_and_the_seed_of_the_adapters(tmp_path):
    recipe = recipes.load("nodes", ["model.adapters={rank = 2, style = 'ffa'}", "model.seed=5"])
    with pytest.raises(
        ConfigError, match=r"model\.adapters: all nodes must have the same frozen base"
    ):
        recipe_for_nodes(recipe, 3)
    save_file(base().state_dict(), tmp_path / "base.safetensors")
    changed = recipe.model.model_copy(update={"weights": str(tmp_path / "base.safetensors")})
    work = work_of(recipe_for_nodes(recipe.model_copy(update={"model": changed}), 3))
    assert work["model"]["weights"] == models.digest_of_file(tmp_path / "base.safetensors")
    assert work["model"]["adapters"] == {"seed": 5, "rank": 2, "style": "ffa"}


def test_a_recipe_adapts_a_bundled_model_and_counts_what_the_note_counts():
    options = {
        "rank": 4,
        "targets": ["query", "value", "expand", "contract"],
        "also": ["outputs.bias"],
    }
    for adapters, size in (
        (options, 7744),  # L3
        (options | {"style": "ffa"}, 3904),
        ({"rank": 0, "also": ["outputs", "norm"]}, 4288),
        ({"rank": 0, "also": ["bias", "norm", "norm1", "norm2"]}, 2304),
    ):
        made = models.build(
            "transformer", in_shape=(32,), classes=64, width=64, layers=3, adapters=adapters
        )
        assert LayerTable.from_module(made).size == size
    with pytest.raises(ConfigError, match=r"model\.adapters: .*ranks.*its options: rank, targets"):
        models.build("mlp", in_shape=(4,), classes=2, adapters={"rank": 4, "ranks": 4})


@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_factors_in_turn_move_in_their_own_rounds_only(vectorize, tmp_path):
    changes = {
        "mechanism.name": "alternate",
        "mechanism.group_by": "factor",
        "training.vectorize": vectorize,
    }
    before = dict(adapted().named_parameters())
    for rounds, moved in ((1, {"B", None}), (2, {"A", "B", None})):
        own = CHANGES | changes | {"federation.rounds": rounds}
        result = simulations.simulate(
            model=adapted(), data=numbers(), overrides=own, run_dir=tmp_path / str(rounds)
        )
        after = result.model().named_parameters()
        assert {factor_of(name) for name, p in after if not torch.equal(p, before[name])} == moved
    assert [row["released"] for row in result.history[1:]] == [3, 3]
    assert result.epsilon == pytest.approx(8, rel=1e-2)


@pytest.mark.parametrize("kind", [SequentialTrainer, VectorizedTrainer, FedSGD, FedProx])
def test_a_frozen_factor_is_not_trained(kind):
    model = adapted()
    nn.init.normal_(model[0].lora_B.weight)
    layers = LayerTable.from_module(model, "factor")
    trained = torch.cat(
        [torch.full((layer.size,), float("lora_A" not in layer.name)) for layer in layers.layers]
    )
    flat, settings = (
        layers.flatten(model),
        LocalTraining(lr=0.1, optimizer="adam", epochs=2, gradient_clip=1.0),
    )
    x, y = torch.from_numpy(numbers()["train"][0]), torch.from_numpy(numbers()["train"][1])
    one, all_of = (
        next(
            kind(adapted(), layers, settings).updates(
                flat, [ClientTask(x, y, torch.Generator(), 2, mask)]
            )
        ).clone()[0]
        for mask in (trained, None)
    )
    assert not one[trained == 0].any()
    assert one[trained == 1].any()
    assert all_of[trained == 0].any()


def test_alternation_needs_factors_that_are_layers():
    changes = CHANGES | {"mechanism.name": "alternate", "mechanism.group_by": "adapter"}
    with pytest.raises(
        ConfigError, match=r"layer '0' holds both factors.*group_by = 'factor', 'kind' or 'tensor'"
    ):
        simulations.simulate(model=adapted(), data=numbers(), overrides=changes)
    facts = RunFacts(1.0, Sampling("poisson", 100, 0.1))
    for model in (adapted(style="ffa"), base()):  # nothing to alternate between
        plan = mechanisms.get("alternate").plan(
            LayerTable.from_module(model), facts, Transcript(1, ())
        )
        assert plan.released.all()


def test_the_compiled_kernel_refuses_to_freeze_layers():
    if reason() is not None:  # not in a mark: it compiles the kernel, when tests are collected
        pytest.skip("no compiled kernel here")
    layers = LayerTable.from_module(base())
    task = ClientTask(
        torch.zeros(2, 6), torch.zeros(2).long(), torch.Generator(), 1, torch.ones(layers.size)
    )
    with pytest.raises(ConfigError, match=r"'native' trains all layers"):
        next(NativeTrainer(base(), layers, LocalTraining()).updates(layers.flatten(base()), [task]))


def test_a_plan_says_what_it_freezes_and_other_plans_keep_their_text():
    layers = LayerTable.from_module(adapted(), "kind")
    facts = RunFacts(1.0, Sampling("poisson", 100, 0.1))
    plan = mechanisms.get("alternate").plan(layers, facts, Transcript(0, ()))
    again = ReleasePlan.from_json(layers, plan.to_json())
    assert again.freezes
    assert torch.equal(
        again.trained,
        torch.tensor(again.released).repeat_interleave(torch.tensor(layers.sizes)).float(),
    )
    assert (
        "freezes" not in mechanisms.get("uniform").plan(layers, facts, Transcript(0, ())).to_json()
    )


def test_a_run_names_the_base_and_what_never_moved(tmp_path):
    changes = CHANGES | {
        "mechanism.name": "alternate",
        "mechanism.group_by": "kind",
        "federation.rounds": 1,
    }
    with pytest.warns(
        Notice,
        match=r"has not changed these parameters: 0\.lora_A\.weight, 2\.lora_A\.weight; no round",
    ):
        result = simulations.simulate(
            model=adapted(), data=numbers(), overrides=changes, run_dir=tmp_path / "run"
        )
    assert result["unmoved"] == ["0.lora_A.weight", "2.lora_A.weight"]
    assert result["base_sha256"] == fixed_digest(adapted())


def test_a_base_that_changes_during_the_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = base()
    save_file(net.state_dict(), "base.safetensors")
    changed = [False]

    def replaced(row):
        if not changed[0]:
            save_file(
                {name: value + 1 for name, value in net.state_dict().items()}, "base.safetensors"
            )
            changed[0] = True

    changes = CHANGES | {"model.weights": "base.safetensors"}
    with pytest.raises(RunError, match=r"frozen parameters of the model changed during the run"):
        simulations.simulate(model=adapted(), data=numbers(), overrides=changes, progress=replaced)


def test_a_missing_base_says_which_command_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", "text-adapters"])
    assert isinstance(done.exception, ConfigError)
    assert "text-base.safetensors: run `fedlgm pretrain text-adapters` in its folder" in str(
        done.exception
    )


def test_a_base_is_pretrained_on_public_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "public.txt").write_text("In the beginning was the word. " * 20)
    small = ["--set", "model.width=8", "--set", "model.layers=1", "--set", "model.heads=1"]
    words = ["pretrain", "--text", "public.txt", "--steps", "20", "--json", *small]
    made = [
        json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output) for _ in range(2)
    ]
    assert made[0] == made[1]
    assert made[0]["sha256"] == models.digest_of_file("text-base.safetensors")
    assert 0 < made[0]["loss"] < 4.2
    done = CliRunner().invoke(
        app, ["plan", "text-adapters", *small, "--set", "federation.rounds=2"]
    )
    assert done.exit_code == 0, done.output
    for extra, message in (
        (["--text", "no.txt"], "cannot be read"),
        (["--set", "task.name=classification"], "next-token"),
    ):
        assert message in str(CliRunner().invoke(app, [*words, *extra]).exception)
    with pytest.raises(ConfigError, match="steps must be a whole number of at least 1, got 0"):
        pretrain(recipes.load("text-adapters"), "base.safetensors", steps=0)
    assert not (tmp_path / "base.safetensors").exists()
