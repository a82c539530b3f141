"""Models of transformers and peft in a whole run."""

from __future__ import annotations

import pytest
import torch
from transformer_models import CHANGES, LENGTH, bert, gpt2, lora, run, sentences

import simulations
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import models
from fedlgm.training.models.huggingface import plain, task_of
from fedlgm_lab.studies.networks import first_of_huggingface
from simulations.arguments import resolve
from simulations.runs.folder import RunFolder


@pytest.mark.parametrize("make", [gpt2, bert])
def test_a_model_and_a_dataset_go_in_and_the_same_class_comes_out(make, tmp_path):
    model = make(dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = run(model, tmp_path / "run")
    trained = result.model()
    assert type(trained) is type(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert result["headline"] == ("perplexity" if make is gpt2 else "accuracy")
    assert RunFolder.open(result.folder).recipe().federation.clients == 10
    assert result.epsilon <= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "engine"),
    [
        (gpt2, "processes"),
        (bert, "processes"),
        (lambda: lora(gpt2()), "ray"),
        (lambda: lora(bert()), "processes"),
    ],
    ids=["gpt2", "bert", "gpt2-lora", "bert-lora"],
)
def test_every_engine_gives_the_same_model(make, engine, tmp_path):
    here, there = (run(make(), tmp_path / name, engine=name) for name in ("local", engine))
    assert there["model_sha256"] == here["model_sha256"]


def test_vectorised_training_takes_eager_attention_without_a_mask(tmp_path):
    even = sentences(labels=False).map(lambda row: {"input_ids": row["input_ids"][:3]})
    options = {"data": even, "users": "user", "overrides": CHANGES | {"training.vectorize": "on"}}
    found = {}
    for name, changes in (("on", {}), ("off", {"training.vectorize": "off"})):
        options["overrides"] |= changes
        result = simulations.simulate(
            "digits",  # by SGD: Adam turns rounding into steps
            model=gpt2(attn_implementation="eager"),
            run_dir=tmp_path / name,
            **options,
        )
        found[name] = torch.cat([p.flatten() for p in result.model().parameters()])
    torch.testing.assert_close(found["on"], found["off"], rtol=1e-4, atol=1e-5)


def test_the_refusal_of_vectorised_training_names_what_transformers_needs(tmp_path):
    with pytest.raises(
        ConfigError, match=r'attn_implementation="eager", use_cache=False'
    ) as caught:
        run(gpt2(), tmp_path / "run", overrides={"training.vectorize": "on"})
    assert "training.vectorize = 'off'" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_checkpointing_that_would_leave_adapters_untrained_is_refused(tmp_path):
    model = lora(gpt2())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ConfigError, match=r"lora_A.*would stay untrained.*set use_reentrant=False"):
        run(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def protecting_examples(model, path, engine="local"):
    short = {key: value for key, value in CHANGES.items() if key != "federation.rate"} | {
        "training.batch_size": 16
    }
    options = {
        "data": sentences(not task_of(model)),
        "users": "user",
        "overrides": short,
        "engine": engine,
    }
    return simulations.simulate("dp-sgd-digits", model=model, run_dir=path, **options)


@pytest.mark.slow
def test_examples_are_protected_in_gpt2(tmp_path):
    """The guarantee is proven if the model runs under vmap, which masks of other attention code do
    not."""
    eager = gpt2(attn_implementation="eager", use_cache=False)
    assert protecting_examples(eager, tmp_path / "eager").guarantee.startswith(
        "proven (example-level"
    )
    other = protecting_examples(gpt2(), tmp_path / "other").guarantee
    assert other.startswith("conditional (example-level")
    assert "vmap" in other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "engine"),
    [
        (gpt2, "flower"),
        (bert, "ray"),
        (lambda: lora(gpt2()), "processes"),
        (lambda: lora(bert()), "processes"),
    ],
    ids=["gpt2", "bert", "gpt2-lora", "bert-lora"],
)
def test_every_engine_protects_examples_alike(make, engine, tmp_path):
    here, there = (protecting_examples(make(), tmp_path / name, name) for name in ("local", engine))
    for figure in ("model_sha256", "base_sha256"):
        assert there.get(figure) == here.get(figure)
    assert not here.get("unmoved")


def test_dropout_is_refused_where_examples_are_protected_and_the_message_says_how_to_remove_it(
    tmp_path,
):
    with pytest.raises(ConfigError, match=r"dropout to 0.*module\.p = 0\.0"):
        simulations.simulate(
            "dp-sgd-digits",
            model=gpt2(dropout=0.1),
            data=sentences(labels=False),
            users="user",
            run_dir=tmp_path / "run",
        )


def test_a_model_without_a_head_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"BertModel returns no logits: use a class with a head"):
        run(bert().bert, tmp_path / "run")


def test_the_head_names_the_task_and_adapters_do_not_hide_it():
    assert (task_of(gpt2()), task_of(lora(gpt2())), task_of(bert())) == (
        "causal-lm",
        "causal-lm",
        None,
    )
    several = bert(problem_type="multi_label_classification")
    assert task_of(several) == "multi-label"


def test_only_adapters_and_head_are_released():
    names = LayerTable.from_module(plain(lora(bert()))).names
    assert all("lora_" in name or "classifier" in name for name in names)
    built = models.build(lora(gpt2()), in_shape=((LENGTH,), (LENGTH,)), classes=None)
    assert sum(LayerTable.from_module(built).sizes) == 2 * (2 * 16 + 2 * 48)


def test_a_model_of_transformers_has_the_defaults_of_lora_and_moves_its_adapters(tmp_path):
    """Unless a recipe is named; the history begins with the metrics before training."""
    torch.manual_seed(0)
    short = {"federation.rounds": 3, "privacy.delta": 0.01, "run.evaluate_every": 1, "run.seed": 1}
    options = {"data": sentences(labels=False), "users": "user"}
    model = lora(gpt2())
    result = simulations.simulate(
        model=model, **options, overrides=short, run_dir=tmp_path / "default"
    )
    recipe = RunFolder.open(result.folder).recipe()
    assert (recipe.training.optimizer, recipe.training.epochs) == ("adam", 1)
    assert [row["round"] for row in result.history] == [0, 1, 2, 3]
    assert "perplexity" in result.history[0]["metrics"]
    start = dict(model.named_parameters())
    trained = [
        (value - start[name]).abs().max()
        for name, value in result.model().named_parameters()
        if value.requires_grad
    ]
    assert min(trained) > 0.05  # the server's Adam moves every coordinate by about 0.05 per round
    named, _ = resolve("digits", {"model": gpt2()})
    assert named.training.optimizer == "sgd"


def test_the_default_recipe_leaves_the_task_to_the_models_head():
    recipe, _ = resolve(None, {"model": bert()})
    assert (recipe.task.name, recipe.training.optimizer) == ("classification", "adam")


@pytest.mark.parametrize("make", [gpt2, bert, lambda: lora(gpt2())], ids=["gpt2", "bert", "lora"])
def test_a_function_that_returns_a_model_has_the_defaults_of_the_model(make):
    state = torch.get_rng_state()
    given, same = ({"model": what, "task": task_of(what)} for what in (make, make()))
    assert given["task"] == same["task"]
    assert first_of_huggingface([make]) is make
    torch.set_rng_state(state)
    recipe, expected = resolve(None, given)[0], resolve(None, same)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert (recipe.training, recipe.federation) == (expected.training, expected.federation)
    assert recipe.task == expected.task


def test_a_function_that_fails_is_reported_by_the_run():
    assert resolve(None, {"model": lambda: 1 / 0})[0].training.optimizer == "sgd"
    with pytest.raises(ConfigError, match=r"ZeroDivisionError"):
        simulations.simulate(model=lambda: 1 / 0)
