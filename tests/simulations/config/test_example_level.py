"""Recipes of example-level privacy: what does not fit is refused, and plans say what they count."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fedlgm.errors import ConfigError, DataError, FedlgmError
from fedlgm.training.rates import factors
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.facts import facts_of
from simulations.config.own import Own
from simulations.summaries.planning import plan_report
from tests.support.example_level import central, federated


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["privacy.unit=client"],
            "dp-sgd bounds examples, but privacy.unit is 'client': set privacy.unit = 'example'",
        ),
        (
            ["mechanism.name=snr-consistent"],
            "bounds whole clients, but .* use one of dp-sgd, auto-s, dp-psac, lm-dp-sgd$",
        ),
        (["mechanism.name=laplace-iid"], "laplace-iid bounds whole clients"),
        (["training.epochs=3"], "training.epochs: a round is one step here"),
        (["training.gradient_clip=1"], "training.gradient_clip cannot be 1.0"),
        (["training.vectorize=on"], "training.vectorize cannot be 'on'"),
        (["run.audit=true"], "run.audit cannot be True"),
        (
            ["training.sampling_rate=0.1"],
            "training.sampling_rate is for clients that noise their own steps",
        ),
        (["federation.server_lr=0.5"], "server_lr: a round is one step here"),
        (["federation.clients=4", "federation.rate=0.5"], "every client takes part in every step"),
        (
            ["privacy.trust=local"],
            "training.sampling_rate is needed where clients noise their own steps",
        ),
        (["mechanism.style=auto-s"], "is a separate mechanism: set mechanism.name = 'auto-s'"),
        (["mechanism.allocation=snr-consistent"], "style 'flat' has one bound and one noise scale"),
        (["mechanism.style=ghost"], "unknown style 'ghost'; known: flat, per-layer"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        central(*changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            lambda: central("training.batch_size=5000"),
            "batch_size = 5000 exceeds the number of training examples, 1442",
        ),
        (
            lambda: federated("training.batch_size=900"),
            "batch_size = 900 is more than the .* of the largest client",
        ),
        (
            lambda: central(
                "training.batch_size=1442", "privacy.epsilon=1e-5", "federation.rounds=1000000"
            ),
            r"after 1000000 releases: .*; federation.rounds = 3906 would suffice, with .* of 4.\d+e\+06",
        ),
        (
            lambda: central("privacy.epsilon=1e-3", "privacy.delta=1e-30"),
            (
                r"epsilon=0.001, .* after 12 .* no number of steps would meet the budget: the least epsilon that "
                r"the rdp accountant shows at this delta is 0.\d+; raise privacy.epsilon"
            ),
        ),
    ],
)
def test_runs_that_cannot_be_are_refused(recipe, words, tmp_path):
    with pytest.raises(FedlgmError, match=words):
        launch.simulate(recipe(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_batch_norm_is_refused_with_a_remedy():
    raw = central().model_dump(exclude_none=True)
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)
    )
    own = Own(model=net)
    own.into(raw)
    with pytest.raises(ConfigError, match="to_groupnorm"):
        Assembly(recipes.Recipe.model_validate(raw), own).check()


def test_old_recipes_are_written_as_they_were():
    text = recipes.load("digits").to_toml()
    assert not {"unit", "sampling_rate", "steps"} & {
        line.partition(" ")[0] for line in text.splitlines()
    }
    assert "steps" not in facts_of(recipes.load("digits")).to_dict()


@pytest.mark.parametrize("trust", ["central", "local"])
def test_plans_need_no_files_of_a_bundled_set(trust, tmp_path, monkeypatch):
    """The published number of training examples is enough; a run counts them."""
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path))
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")
    own = [] if trust == "central" else ["training.sampling_rate=0.1", "federation.rate=1.0"]
    changes = ["federation.rounds=20", "privacy.accountant=rdp", f"privacy.trust={trust}", *own]
    recipe = recipes.load("lm-dp-sgd-cifar10", changes)
    report = plan_report(recipe)
    if trust == "central":
        assert "of 50000 examples (expected batch 500" in report["sampling"]
    assert report["epsilons"]["rdp"] <= recipe.privacy.epsilon * (1 + 1e-6)
    with pytest.raises(DataError, match="cifar10 not found"):
        Assembly(recipe).check()


def test_plans_say_how_examples_are_sampled():
    report = plan_report(central())
    assert report["unit"] == "example"
    assert "of 1442 examples (expected batch 128, 1.07 epochs), add-remove" in report["sampling"]
    assert report["epsilons"]["rdp"] <= 4.0
    local = plan_report(federated())
    assert "3 steps per round, each on 0.1 of a client's examples, divided by" in local["sampling"]
    assert local["epsilons"]["rdp"] == pytest.approx(4.0, abs=1e-3)
    assert math.isfinite(local["noise_norm"])
    json.dumps(local)


@pytest.mark.parametrize(
    ("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)], ids=str
)
def test_the_step_on_a_release_is_that_of_torchs_optimizer_with_decay(optimizer, momentum):
    """AdamW, SGD and momentum with decoupled decay, each with a linear schedule of the rate."""
    rounds = 4
    recipe = central(
        f"federation.rounds={rounds}",
        f"training.optimizer={optimizer}",
        f"training.momentum={momentum}",
        "training.weight_decay=0.3",
        "training.lr=0.1",
        "federation.server_schedule=linear",
    )
    step = Assembly(recipe).model.server_optimizer()
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 7))
    model = weights.detach().clone()
    peer = (
        torch.optim.AdamW([weights], lr=0.1, weight_decay=0.3)
        if optimizer == "adam"
        else torch.optim.SGD([weights], lr=0.1, momentum=momentum)
    )
    for round, factor in enumerate(factors("linear", rounds)):
        mean_update = torch.randn(7, generator=torch.Generator().manual_seed(round))
        peer.param_groups[0]["lr"] = 0.1 * factor
        if optimizer == "sgd":  # torch's SGD has coupled decay only
            weights.data.mul_(1 - 0.1 * factor * 0.3)
        weights.grad = -mean_update
        peer.step()
        model = step.step(model, mean_update)
        torch.testing.assert_close(model, weights.detach(), rtol=1e-5, atol=1e-6)


def test_decay_changes_the_model_and_no_epsilon(tmp_path):
    changes = ("federation.rounds=2", "training.optimizer=adam", "training.lr=0.05")
    plain, decayed = (
        launch.simulate(central(*changes, *more), run_dir=tmp_path / str(len(more)))
        for more in ((), ("training.weight_decay=2",))
    )
    assert plain["epsilon"] == decayed["epsilon"]
    assert plain["model_sha256"] != decayed["model_sha256"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["run.keep_releases=true"], "repeats only steps without training.weight_decay"),
        (["federation.server_optimizer=mine:Step"], "your own server step applies its own"),
    ],
)
def test_decay_that_nothing_would_apply_is_refused(changes, words):
    def server_step():
        recipe = central("training.weight_decay=0.1", *changes)
        return recipe.protects.server_step(recipe, None)

    with pytest.raises(ConfigError, match=words):
        server_step()
