"""Advice from public examples."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import simulations
from fedlgm import allocation
from fedlgm.errors import ConfigError, DataError, Notice
from fedlgm.layers import LayerTable
from fedlgm.plan import ReleasePlan
from simulations.advice.picture import bars
from simulations.advice.public import outline_of
from simulations.advice.recommend import RULES, Recommendation
from simulations.advice.score import Curvature, Landscape, score
from simulations.advice.verdict import verdict
from simulations.config.assembly import Assembly
from simulations.config.own import Own
from simulations.config.recipe import load, validate

SHORT = {"federation.rounds": 5, "privacy.epsilon": 2.0}
_RNG = np.random.default_rng(3)
_MEANS = _RNG.normal(size=(3, 6))


def _blobs(count: int) -> tuple[np.ndarray, np.ndarray]:
    y = _RNG.integers(3, size=count)
    return (_MEANS[y] + _RNG.normal(size=(count, 6))).astype(np.float32), y


PUBLIC = _blobs(400)


class _Untouchable:
    """Private data: anything that looks at them fails."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"private data were touched: {name}")

    def __array__(self, *_: object) -> np.ndarray:
        raise AssertionError("private data were touched")

    __len__ = __iter__ = __getitem__ = __array__  # type: ignore[assignment]


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return simulations.recommend("digits", public="digits/public", overrides=SHORT)


def test_scores_are_relative_to_the_flat_rule_and_name_every_rule(found: Recommendation) -> None:
    assert found.scores["gaussian"] == 1.0
    assert set(found.scores) == {"gaussian", *RULES} == {"gaussian", *allocation.names()} - {"max-snr-sum"}
    assert found.advice
    assert found["private_examples_read"] == 0
    # Under EqClip these are one mechanism each.
    assert found.scores["uniform"] == pytest.approx(found.scores["sensitivity-proportional"])
    assert found.scores["min-total-noise"] == pytest.approx(found.scores["snr-consistent"])


def test_the_same_call_gives_the_same_figures(found: Recommendation) -> None:
    again = simulations.recommend("digits", public="digits/public", overrides=SHORT)
    assert json.dumps(dict(again)) == json.dumps(dict(found))


def test_noise_on_the_mean_is_that_of_the_plan(found: Recommendation) -> None:
    plan = Assembly(load("digits", [f"{key}={value}" for key, value in SHORT.items()])).first_plan()
    assert found["noise_on_mean"] == pytest.approx(plan.effective_multiplier / 50, rel=1e-6)


@pytest.mark.parametrize("public", [PUBLIC, {"train": PUBLIC, "test": PUBLIC}, "test", None])
def test_private_data_are_never_touched(public: object) -> None:
    data = {"train": (_Untouchable(), _Untouchable()), "test": PUBLIC, "clients": [[0]] * 40}
    settings = {"privacy.delta": 1e-3, "federation.rate": 0.5} | SHORT
    with pytest.warns(Notice, match="synthetic") if public is None else nullcontext():
        advice = simulations.recommend(
            model=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), data=data, public=public, examples=800,
            overrides=settings,
        )  # fmt: skip
    assert set(advice.scores) == {"gaussian", *RULES}
    assert advice["examples_per_client"] == 20.0  # of the data's own 40 clients


def test_a_private_set_that_is_gone_is_not_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A recipe whose folder does not exist: only the public set named is loaded."""
    advice = simulations.recommend(
        "fashion-mnist", public="digits/public", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        overrides={"data.dir": str(tmp_path), "federation.rounds": 5, "training.lr": 0.01},
    )  # fmt: skip
    assert advice["public"] == "training examples of digits/public"


def test_a_warm_up_at_chance_is_refused() -> None:
    noise = (np.zeros((200, 6), dtype=np.float32), np.arange(200) % 3)
    with pytest.raises(ConfigError, match="at chance"):
        simulations.recommend(
            model=nn.Linear(6, 3), data={"train": noise, "test": noise}, public="test", examples=500,
            overrides={"privacy.delta": 1e-4} | SHORT,
        )  # fmt: skip


def test_updates_that_lower_no_loss_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulations.advice.recommend.score", lambda *_: 0.0)
    with pytest.raises(ConfigError, match="does not lower the loss"):
        simulations.recommend(
            model=nn.Linear(6, 3), data={"train": None, "test": PUBLIC}, public="test", examples=500,
            overrides={"privacy.delta": 1e-4} | SHORT,
        )  # fmt: skip


def test_an_example_level_recipe_is_scored_by_its_gradients() -> None:
    advice = simulations.recommend("dp-sgd-digits", public="digits/public", overrides={"federation.rounds": 20})
    assert advice["unit"] == "example"
    assert advice.scores["dimension-adjusted"] < 1.2
    assert "dp-sgd" in advice.advice or "uniform" in advice.advice


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"public": (PUBLIC[0][:4], PUBLIC[1][:4])}, DataError, "at least 16"),
        ({"public": "no-such-set"}, ConfigError, "unknown data set"),
        ({"overrides": {"mechanism.name": "none"}, "public": "test"}, ConfigError, "adds no noise"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulations.recommend("digits", **arguments)  # type: ignore[arg-type]


def test_traces_are_those_of_the_hessian() -> None:
    x, y = PUBLIC
    outline, _ = outline_of({"test": (x, y), "train": None})
    torch.manual_seed(1)
    own = Own(model=nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), data=outline)
    raw = load("digits").model_dump(exclude_none=True)
    own.into(raw)
    assembly = Assembly(validate(raw), own)
    module = assembly.module()
    layers = LayerTable.from_module(module)
    model = layers.flatten(module)
    landscape = Landscape(assembly, layers, 400, probes=20)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(module, layers.unflatten(flat), (torch.from_numpy(x),))
        return nn.functional.cross_entropy(outputs, torch.from_numpy(y))

    hessian = torch.autograd.functional.hessian(loss, model)
    generator, exact = torch.Generator().manual_seed(0), np.zeros(2)
    for _ in range(20):  # the same random signs
        signs = torch.randint(0, 2, (layers.size,), generator=generator).float() * 2 - 1
        exact += [float(part.sum()) / 20 for part in layers.split(signs * (hessian @ signs))]
    assert landscape.at(model).traces == pytest.approx(exact, rel=1e-3)


def test_the_score_is_progress_squared_over_the_noise_cost() -> None:
    recipe = load("digits", ["mechanism.name=uniform"])
    assembly = Assembly(recipe)
    plan: ReleasePlan = assembly.first_plan()
    gradient, mean = torch.ones(plan.layers.size), torch.full((plan.layers.size,), -0.5)
    found = Curvature({}, gradient, np.array([2.0, 3.0]))
    expected = (0.5 * plan.layers.size) ** 2 / float((np.array([2.0, 3.0]) * plan.sigma**2).sum())
    assert score(found, mean, plan) == pytest.approx(expected)
    assert score(found, -mean, plan) == 0.0


def test_verdicts() -> None:
    assert verdict({"gaussian": 1.0, "uniform": 1.01}, "client") == "level: use gaussian."
    assert "uniform is expected to be worth 2.00" in verdict({"gaussian": 1.0, "uniform": 2.0}, "client")
    assert verdict({"gaussian": 1.0, "uniform": 0.1}, "example").endswith("avoid uniform.")
    assert len({len(line) for line in bars({"gaussian": 1.0, "uniform": 1e-9, "snr-consistent": 1e9})}) <= 2
