"""`training.kernel`: what it refuses, and that a run's recipe says which arithmetic made its
model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import simulations
from fedlgm.data import DataSet
from fedlgm.errors import ConfigError
from fedlgm.planning.plan import ReleasePlan
from fedlgm.training.native import Program, library
from fedlgm_lab.reports.report import write_report
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_auto
from simulations.config.own import Own
from simulations.config.run_model import RunModel
from simulations.engines import flower_entry
from simulations.runs.folder import RunFolder


def test_the_text_of_recipes_without_a_kernel_stays() -> None:
    """Ledgers belong to it."""
    usual = recipes.load("digits")
    assert "kernel" not in usual.to_toml()
    assert "kernel" not in recipes.load("digits", ["training.kernel=torch"]).to_toml()


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("digits", ["training.kernel=native", "training.vectorize=on"], "one client after another"),
        ("digits", ["training.kernel=fast"], "training.kernel"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    recipe: str, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        recipes.load(recipe, overrides)


@pytest.mark.parametrize(
    ("recipe", "override", "words"),
    [
        ("digits", "trainer.name=fedprox", "no native form"),
        ("text-gru", "training.vectorize=off", "does not know"),
    ],
)
def test_models_and_trainers_that_the_kernel_does_not_know_are_refused(
    recipe: str, override: str, words: str
) -> None:
    assembly = Assembly(recipes.load(recipe, [override, "training.kernel=native"]))
    with pytest.raises(ConfigError, match=words):
        assembly.model.trainer(vectorized=False, compiled=False)


def test_a_model_that_the_kernel_does_not_know_is_refused_at_example_level_before_the_run() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 10))
    changes = ["training.kernel=native", "model.hidden=none", "model.activation=none"]
    with pytest.raises(ConfigError, match=r"training\.kernel = 'native' does not know .*GELU"):
        Assembly(recipes.load("dp-sgd-digits", changes), Own(model=model)).check()


def on(recipe: str, *overrides: str) -> Assembly:
    """The run with its kernel settled."""
    return resolve_auto(
        Assembly(recipes.load(recipe, [*overrides, "training.kernel=auto"])), workers=1
    )


@pytest.mark.usefixtures("undrawn")
def test_without_a_compiler_auto_is_torch_and_says_why_and_native_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was made with the kernel never goes on with other arithmetic."""
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(library, "instruction_set", lambda: "avx2")
    library.library.cache_clear()
    overrides = [
        "federation.rounds=1",
        "federation.clients=20",
        "training.kernel=auto",
        "privacy.accountant=rdp",
    ]
    result = simulations.simulate("digits", overrides=overrides, run_dir=tmp_path / "run")
    assert recipes.load(tmp_path / "run" / "recipe.toml").training.kernel is None
    made = RunFolder.open(tmp_path / "run").provenance.read()["trained_by"]
    assert made.startswith(
        "PyTorch (the native training kernel was not compiled: false ended with status 1"
    )
    write_report(tmp_path / "run")
    assert "PyTorch (the native" in (tmp_path / "run" / "report.html").read_text()
    assert result["rounds"] == 1
    with pytest.raises(ConfigError, match="was not compiled"):
        Assembly(recipes.load("digits", ["training.kernel=native"])).check()


@pytest.mark.parametrize(
    ("recipe", "overrides", "why"),
    [
        ("digits", ["trainer.name=fedprox"], "no native form"),
        ("digits", ["training.vectorize=on"], "vectorize is 'on'"),
        (
            "dp-sgd-digits",
            ["model.hidden=[900]"],
            "slower for models of more than 50,000 parameters",
        ),
    ],
)
def test_auto_is_torch_for_runs_that_the_kernel_does_not_know(
    recipe: str, overrides: list[str], why: str
) -> None:
    made = on(recipe, *overrides)
    assert made.recipe.training.kernel is None
    assert why in str(made.no_kernel)


def test_auto_is_torch_for_a_layer_that_the_kernel_does_not_know() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 10))
    recipe = recipes.load(
        "digits", ["training.kernel=auto", "model.hidden=none", "model.activation=none"]
    )
    made = resolve_auto(Assembly(recipe, Own(model=model)), workers=1)
    assert made.recipe.training.kernel is None
    assert "GELU" in str(made.no_kernel)


def test_auto_is_torch_where_a_plan_freezes_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = torch.ones(2410)
    monkeypatch.setattr(ReleasePlan, "trained", property(lambda self: frozen))
    monkeypatch.setattr(
        "fedlgm.training.native.trainer.library", lambda: None
    )  # refused before it is called
    assert "freezes some" in str(on("digits").no_kernel)


@pytest.mark.parametrize("recipe", ["digits", "dp-sgd-digits"])
def test_the_kernel_is_tried_on_public_examples(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for PyTorch is public, and an error of private examples may quote them."""
    x, y = np.zeros((60, 64), np.float32), np.arange(60) % 10
    data, seen = DataSet.from_arrays((x + 7, y), (x, y)), []

    def tried(trainer: object, given: object, *_: object) -> None:
        seen.append(given if isinstance(given, torch.Tensor) else given[0].x)
        raise ConfigError("a layer that it does not know")

    monkeypatch.setattr(
        "fedlgm.training.example_level.native.NativeExampleGradients",
        lambda *_: SimpleNamespace(sum=partial(tried, None)),
    )
    native = SimpleNamespace(updates=lambda model, tasks: tried(None, tasks))
    monkeypatch.setattr(RunModel, "native", lambda *_, **__: native)
    parsed = recipes.load(
        recipe, ["training.kernel=auto", "federation.clients=10", "federation.rate=1.0"]
    )
    made = resolve_auto(Assembly(parsed, Own(data=data)), workers=1)
    assert made.no_kernel == "a layer that it does not know"
    assert [float(one.abs().max()) for one in seen] == [0.0]


def test_recipes_that_leave_the_kernel_to_the_machine_have_models_that_it_knows() -> None:
    """Without data: their plans need none."""
    asking = [name for name in recipes.names() if recipes.load(name).training.kernel is not None]
    assert {
        "fashion-mnist",
        "mnist",
        "inid-fashion-mnist",
        "ladp-fashion-mnist",
        "ladp-cifar10-cnn",
    } <= set(asking)
    assert not {
        name for name in asking if "digits" in name
    }  # their runs end before a compilation pays
    for name in asking:
        assembly = Assembly(recipes.load(name), planned=True)
        model, data = assembly.model, assembly.data
        Program.of(model.module(), model.layers, data.in_shape, data.task)


def test_a_node_of_a_flower_app_trains_with_pytorch() -> None:
    assert flower_entry._recipe({"recipe": "fashion-mnist", "set": ""}).training.kernel is None


@pytest.mark.skipif(library.instruction_set() is None, reason="the kernel needs AVX2")
def test_the_kernel_trains_example_level_runs_as_pytorch_does(tmp_path: Path) -> None:
    found = {}
    for kernel in ("torch", "auto"):
        overrides = ["federation.rounds=2", f"training.kernel={kernel}"]
        run = simulations.simulate("dp-sgd-digits", overrides=overrides, run_dir=tmp_path / kernel)
        found[kernel] = torch.cat(
            [values.flatten() for values in run.model().state_dict().values()]
        )
    assert recipes.load(tmp_path / "auto" / "recipe.toml").training.kernel == "native"
    assert torch.allclose(found["torch"], found["auto"], atol=1e-4)
    assert not torch.equal(found["torch"], found["auto"])


@pytest.mark.slow
@pytest.mark.skipif(library.instruction_set() is None, reason="the kernel needs AVX2")
def test_clients_that_noise_their_own_steps_train_with_the_kernel_in_every_process(
    tmp_path: Path,
) -> None:
    """Their noise is keyed by their sums, so the models are equal only if all bits are."""
    made = [
        simulations.simulate(
            "example-level-federation",
            overrides=["federation.rounds=2", "training.kernel=native"],
            engine=engine,
            run_dir=tmp_path / engine,
        )
        for engine in ("local", "processes")
    ]
    assert made[0]["model_sha256"] == made[1]["model_sha256"]


@pytest.mark.slow
@pytest.mark.skipif(library.instruction_set() is None, reason="the kernel needs AVX2")
def test_a_run_records_the_kernel_that_auto_chose(tmp_path: Path) -> None:
    runs = [
        simulations.simulate(
            "digits",
            overrides=["federation.rounds=1", f"training.kernel={kernel}"],
            run_dir=tmp_path / kernel,
        )
        for kernel in ("auto", "native")
    ]
    assert recipes.load(tmp_path / "auto" / "recipe.toml").training.kernel == "native"
    assert runs[0]["model_sha256"] == runs[1]["model_sha256"]
    assert (
        RunFolder.open(tmp_path / "auto")
        .provenance.read()["trained_by"]
        .startswith("the compiled kernel (avx")
    )
