"""FedProx: known answers, agreement of both trainers, and how a trainer is chosen and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import simulations
from fedlgm import LayerTable
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm.training import (
    ClientTask,
    FedProx,
    LocalTraining,
    MixedPrecisionTrainer,
    ScheduledTrainer,
    SequentialTrainer,
    VectorizedFedProx,
    VectorizedTrainer,
    kinds,
    rates,
)
from fedlgm.training.tasks import Regression

TWO_ROUNDS = [
    "federation.rounds=2",
    "federation.clients=40",
    "training.epochs=2",
    "privacy.accountant=rdp",
]


def linear() -> torch.nn.Linear:
    module = torch.nn.Linear(3, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
        module.bias.fill_(0.5)
    return module


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(5))
    return x, x.sum(1, keepdim=True)


def update(kind: type, settings: LocalTraining, **options: float) -> np.ndarray:
    layers = LayerTable.from_module(linear())
    trainer = kind(linear(), layers, settings, task=Regression(loss="squared"), **options)
    task = ClientTask(*examples(), torch.Generator().manual_seed(1), epochs=3)
    return (
        raw_updates(next(iter(trainer.updates(layers.flatten(linear()), [task]))))[0].numpy().copy()
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_both_trainers_take_the_steps_of_a_plain_loop(optimizer: str) -> None:
    mu, loop, before, (x, y) = 0.7, linear(), list(linear().parameters()), examples()
    layers, settings = LayerTable.from_module(loop), LocalTraining(optimizer, lr=0.05, batch_size=4)  # type: ignore[arg-type]
    start, order = layers.flatten(loop), torch.Generator().manual_seed(1)
    steps = (torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam)(
        loop.parameters(), lr=0.05
    )
    for permutation in [torch.randperm(12, generator=order) for _ in range(3)]:
        for batch in permutation.split(4):
            steps.zero_grad()
            pull = sum(
                ((p - q.detach()) ** 2).sum()
                for p, q in zip(loop.parameters(), before, strict=True)
            )
            (((loop(x[batch]) - y[batch]) ** 2).mean() + mu / 2 * pull).backward()
            steps.step()
    expected = (layers.flatten(loop) - start).numpy()
    for kind in (FedProx, VectorizedFedProx):
        np.testing.assert_allclose(update(kind, settings, mu=mu), expected, rtol=1e-4, atol=1e-5)
        assert np.abs(update(kind, settings, mu=2 * mu) - expected).max() > 1e-3


@pytest.mark.parametrize(
    ("plain", "proximal"), [(SequentialTrainer, FedProx), (VectorizedTrainer, VectorizedFedProx)]
)
def test_without_the_term_it_is_plain_training_bit_for_bit(plain: type, proximal: type) -> None:
    settings = LocalTraining(lr=0.05)
    assert np.array_equal(update(plain, settings), update(proximal, settings, mu=0.0))


def test_a_run_is_chosen_by_name_in_a_recipe_and_costs_the_same(tmp_path: Path) -> None:
    plain = simulations.simulate(overrides=TWO_ROUNDS, run_dir=tmp_path / "plain")
    proximal = simulations.simulate(
        overrides=TWO_ROUNDS, trainer="fedprox", run_dir=tmp_path / "fedprox"
    )
    stronger = [*TWO_ROUNDS, "trainer.name=fedprox", "trainer.mu=3"]
    other = simulations.simulate(overrides=stronger, run_dir=tmp_path / "stronger")
    assert len({result["model_sha256"] for result in (plain, proximal, other)}) == 3
    assert plain.epsilon == proximal.epsilon == other.epsilon
    assert simulations.resume(tmp_path / "stronger")["model_sha256"] == other["model_sha256"]


class Half(SequentialTrainer):
    """Own: half of plain training's update."""

    def updates(self, model: torch.Tensor, tasks: object) -> object:
        for made in super().updates(model, tasks):  # type: ignore[arg-type]
            yield made / 2


def test_a_trainer_of_ones_own_trains_and_is_remembered(tmp_path: Path) -> None:
    result = simulations.simulate(overrides=TWO_ROUNDS, trainer=Half, run_dir=tmp_path / "run")
    plain = simulations.simulate(overrides=TWO_ROUNDS, run_dir=tmp_path / "plain")
    assert result["model_sha256"] != plain["model_sha256"]
    assert result.epsilon == plain.epsilon
    with pytest.raises(FedlgmError, match="trainer"):
        simulations.resume(tmp_path / "run", trainer=SequentialTrainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer": "fedprx"}, "unknown trainer 'fedprx'.*fedprox"),
        ({"trainer": "fedprox", "overrides": ["trainer.mu=-1"]}, "trainer.mu = -1"),
        ({"trainer": "fedprox", "overrides": ["trainer.mew=1"]}, "has no option 'mew'; known: mu"),
        ({"trainer": 3}, "trainer '<int>' must be a class or function"),
        ({"trainer": lambda *a, **k: 3}, "returns an object of type int without a method updates"),
        ({"trainer": Half, "overrides": ["training.vectorize='on'"]}, "no vectorised form"),
        (
            {"recipe": "dp-sgd-digits", "trainer": "fedprox"},
            "trainer cannot be 'fedprox' with privacy.unit = 'example'",
        ),
    ],
)
def test_what_is_no_trainer_is_refused_before_anything_is_written(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulations.simulate(run_dir=tmp_path / "run", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_registered_trainer_has_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds._KINDS, "_items", dict(kinds._KINDS._items))

    def scaled(
        module: object, layers: object, settings: object, *, device: object, task: object, by: float
    ) -> Half:
        assert by == 2
        return Half(module, layers, settings, device, task)  # type: ignore[arg-type]

    kinds.register("scaled", scaled)
    assert kinds.options_of("scaled") == ("by",)
    assert kinds.get("scaled", by=2).vectorized is None

    def placed(module, layers, settings, device, task, by=1):
        return SequentialTrainer(module, layers, settings, device=device, task=task)

    kinds.register("placed", placed)
    assert kinds.options_of("placed") == ("by",)
    kinds.get("placed", by=2)
    with pytest.raises(ConfigError, match="trainer 'three' must be a class or function"):
        kinds.register("three", 3)
    with pytest.raises(ConfigError, match="scaled"):
        kinds.get("scaled")


def test_a_constant_schedule_is_plain_training_and_a_cosine_follows_the_loop() -> None:
    settings = LocalTraining("sgd", lr=0.05, momentum=0.9, batch_size=4)
    rates.__dict__["ones"] = lambda step, steps: 1.0
    plain = update(SequentialTrainer, settings)
    try:
        np.testing.assert_array_equal(
            update(ScheduledTrainer, settings, schedule="fedlgm.training.rates:ones"), plain
        )
    finally:
        del rates.__dict__["ones"]
    loop, (x, y), order = linear(), examples(), torch.Generator().manual_seed(1)
    layers = LayerTable.from_module(loop)
    start, steps = layers.flatten(loop), torch.optim.SGD(loop.parameters(), lr=0.05, momentum=0.9)
    shape = torch.optim.lr_scheduler.LambdaLR(
        steps, lambda t: rates.factors("cosine", 9)[min(t, 8)]
    )
    for permutation in [torch.randperm(12, generator=order) for _ in range(3)]:
        for batch in permutation.split(4):
            steps.zero_grad()
            ((loop(x[batch]) - y[batch]) ** 2).mean().backward()
            steps.step()
            shape.step()
    np.testing.assert_allclose(
        update(ScheduledTrainer, settings), layers.flatten(loop) - start, atol=1e-6
    )
    with pytest.raises(ConfigError, match="unknown schedule 'cos'"):
        update(ScheduledTrainer, settings, schedule="cos")


def test_mixed_precision_computes_in_bfloat16_and_returns_float32() -> None:
    seen = []

    class Watched(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            seen.append(found.dtype)
            return found

    module, settings = Watched(3, 1), LocalTraining(lr=0.05, batch_size=4)
    module.load_state_dict(linear().state_dict())
    layers = LayerTable.from_module(module)
    trainer = MixedPrecisionTrainer(module, layers, settings, task=Regression(loss="squared"))
    task = ClientTask(*examples(), torch.Generator().manual_seed(1), epochs=3)
    found = raw_updates(next(iter(trainer.updates(layers.flatten(linear()), [task]))))[0]
    assert (found.dtype, set(seen)) == (torch.float32, {torch.bfloat16})
    plain = update(SequentialTrainer, settings)
    assert 0 < np.abs(found.numpy() - plain).max() < 0.02 * np.abs(plain).max() + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["bfloat16", "scheduled"])
def test_their_updates_are_bounded_and_equal_in_two_engines(trainer: str, tmp_path: Path) -> None:
    hashes = {
        simulations.simulate(
            "digits", trainer=trainer, engine=engine, run_dir=tmp_path / engine, workers=workers,
            overrides=TWO_ROUNDS,
        )["model_sha256"]
        for engine, workers in (("local", None), ("processes", 2))
    }  # fmt: skip
    assert len(hashes) == 1
