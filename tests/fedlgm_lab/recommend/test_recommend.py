"""Advice from public examples."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import simulations
from fedlgm.data import DataSet, sources
from fedlgm.errors import ConfigError, DataError, Notice
from fedlgm.planning import allocation
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.recommend.picture import bars
from fedlgm_lab.recommend.public import of_public, outline_of, refuse_private
from fedlgm_lab.recommend.recommend import RULES, Recommendation
from fedlgm_lab.recommend.score import Curvature, Landscape, score
from fedlgm_lab.recommend.units import Clients
from fedlgm_lab.recommend.verdict import verdict
from simulations.config.assembly import Assembly
from simulations.config.own import Own
from simulations.config.recipe import Recipe, load

SHORT = {"federation.rounds": 5, "privacy.epsilon": 2.0}
_RNG = np.random.default_rng(3)
_MEANS = _RNG.normal(size=(3, 6))


def _blobs(count: int) -> tuple[np.ndarray, np.ndarray]:
    y = _RNG.integers(3, size=count)
    return (_MEANS[y] + _RNG.normal(size=(count, 6))).astype(np.float32), y


PUBLIC = _blobs(400)
PRIVATE = {"data.name": "digits/private"}


class _Untouchable:
    """Private data: anything that looks at them fails."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"private data were touched: {name}")

    def __array__(self, *_: object) -> np.ndarray:
        raise AssertionError("private data were touched")

    __len__ = __iter__ = __getitem__ = __array__  # type: ignore[assignment]


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return simulations.recommend("digits", public="digits/public", overrides=SHORT | PRIVATE)


def test_scores_are_relative_to_the_flat_rule_and_name_every_rule(found: Recommendation) -> None:
    assert found.scores["gaussian"] == 1.0
    assert set(found.scores) == {"gaussian", "water-filling", *RULES}
    assert set(RULES) == {*allocation.names()} - {"max-snr-sum"}
    assert found.advice
    assert found["private_examples_read"] == 0
    # Under EqClip these are one mechanism each.
    assert found.scores["uniform"] == pytest.approx(found.scores["sensitivity-proportional"])
    assert found.scores["min-total-noise"] == pytest.approx(found.scores["snr-consistent"])


def test_the_same_call_gives_the_same_figures(found: Recommendation) -> None:
    again = simulations.recommend("digits", public="digits/public", overrides=SHORT | PRIVATE)
    assert json.dumps(dict(again)) == json.dumps(dict(found))


def test_noise_on_the_mean_is_that_of_the_plan(found: Recommendation) -> None:
    plan = Assembly(
        load("digits", [f"{key}={value}" for key, value in SHORT.items()])
    ).privacy.first_plan()
    assert found["noise_on_mean"] == pytest.approx(plan.effective_multiplier / 50, rel=1e-6)


@pytest.mark.parametrize(
    "public",
    [pytest.param(PUBLIC, marks=pytest.mark.slow), {"train": PUBLIC, "test": PUBLIC}, "test", None],
)
def test_private_data_are_never_touched(public: object) -> None:
    data = {"train": (_Untouchable(), _Untouchable()), "test": PUBLIC, "clients": [[0]] * 40}
    settings = {"privacy.delta": 1e-3, "federation.rate": 0.5} | SHORT
    with pytest.warns(Notice, match="synthetic") if public is None else nullcontext():
        advice = simulations.recommend(
            model=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
            data=data,
            public=public,
            examples=800,
            overrides=settings,
        )
    assert set(advice.scores) == {"gaussian", "water-filling", *RULES}
    assert advice["examples_per_client"] == 20.0  # of the data's own 40 clients


@pytest.mark.parametrize("public", ["digits/public", "test", None])
def test_a_private_set_that_is_gone_is_not_missed(
    public: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The files of the training examples are deleted before the call."""
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path / "none"))
    monkeypatch.setattr(sources, "_DEBIAN", tmp_path / "none")
    rng = np.random.default_rng(0)
    y = rng.integers(10, size=200).astype(np.uint8)
    x = rng.integers(30, size=(200, 28, 28)).astype(np.uint8)
    x[np.arange(200), y] += 200  # a row of each class: learned whatever the rounding
    for name, values in (("images-idx3", x), ("labels-idx1", y)):
        header = np.array([2048 + values.ndim, *values.shape], dtype=">i4").tobytes()
        (tmp_path / f"t10k-{name}-ubyte").write_bytes(header + values.tobytes())
    sides = {"digits/public": 64}.get(str(public), 784)
    with pytest.warns(Notice, match="synthetic") if public is None else nullcontext():
        advice = simulations.recommend(
            "mnist", public=public, model=nn.Sequential(nn.Flatten(), nn.Linear(sides, 10)),
            overrides={"data.dir": str(tmp_path), "federation.rounds": 5, "training.lr": 0.01},
        )  # fmt: skip
    expected = {None: "synthetic", "test": "test examples of mnist"}.get(
        public, "training examples of digits/public"
    )
    assert advice["public"].startswith(expected)


def test_what_is_advised_cannot_name_the_private_data() -> None:
    """The recipe that all computation gets has neither the name nor the folder of the data."""
    recipe = of_public(load("fashion-mnist", ["data.dir=/private"]))
    assert recipe.data.model_dump(exclude_none=True) == {
        "name": "<public examples>", "partition": "dirichlet", "partition_seed": 0, "alpha": 0.5
    }  # fmt: skip
    with pytest.raises(ConfigError, match="public examples"):
        Assembly(recipe).data.dataset  # noqa: B018


@pytest.mark.parametrize("name", ["somewhere:private", "image-folder"])
def test_sets_whose_test_examples_come_with_private_ones_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read without its training examples"):
        simulations.recommend("digits", public="test", overrides={"data.name": name})
    with pytest.raises(DataError, match="is not called"):
        simulations.recommend(
            model=nn.Linear(6, 3), data=lambda: pytest.fail("called"), public="test"
        )


SET = DataSet.from_arrays(PUBLIC, PUBLIC)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"recipe": "digits", "public": "digits"},
            r"'digits' holds training examples of the recipe",
        ),
        (
            {"overrides": {"data.name": "digits/private"}, "public": "digits"},
            "'digits' holds training examples",
        ),
        (
            {"recipe": "digits", "public": "digits/public"},
            "'digits/public' holds training examples",
        ),
        (
            {"recipe": "digits", "public": "digits/private"},
            "'digits/private' holds training examples",
        ),
        (
            {"data": {"train": PUBLIC, "test": PUBLIC}, "public": PUBLIC},
            "these are the training examples of data",
        ),
        (
            {
                "data": {"train": PUBLIC, "test": PUBLIC},
                "public": {"train": PUBLIC, "test": PUBLIC},
            },
            "these are the",
        ),
        ({"data": SET, "public": SET}, "these are the training examples of data"),
        (
            {"data": SET, "public": {"train": PUBLIC, "test": PUBLIC, "name": "the same"}},
            "these are the training",
        ),
        (
            {
                "data": {"train": PUBLIC, "test": PUBLIC},
                "public": (PUBLIC[0][::2], PUBLIC[1][::2].copy()),
            },
            "these are the training examples of data",
        ),
        (
            {
                "data": {"train": (torch.from_numpy(PUBLIC[0]), [0]), "test": PUBLIC},
                "public": (PUBLIC[0][3:], [0]),
            },
            "these are the training examples of data",
        ),
    ],
)
def test_private_examples_do_not_pass_as_public_ones(
    arguments: dict[str, object], message: str
) -> None:
    """The advice would state that no private example was read."""
    with pytest.raises(DataError, match=message):
        simulations.recommend(**arguments)  # type: ignore[arg-type]


def test_other_rows_of_one_array_are_no_private_examples() -> None:
    x, y = PUBLIC
    refuse_private(load("digits"), {"train": (x[:90], y[:90]), "test": PUBLIC}, (x[90:], y[90:]))
    refuse_private(load("digits"), {"train": (x[::2], y[::2]), "test": PUBLIC}, (x[1::2], y[1::2]))


def test_test_tables_need_no_column_of_users() -> None:
    test = pandas.DataFrame({"x": [0.0, 1.0], "y": [0, 1]})
    found, _ = outline_of({"train": None, "test": test, "target": "y", "users": "patient"})
    assert found is not None
    assert found.shape == (1,)


def test_a_model_too_large_for_a_minute_is_refused_at_once() -> None:
    with pytest.warns(Notice), pytest.raises(ConfigError, match=r"resnet18 takes .* passes"):
        simulations.recommend("ladp-cifar100-resnet18")


def test_a_warm_up_at_chance_is_refused() -> None:
    noise = (np.zeros((200, 6), dtype=np.float32), np.arange(200) % 3)
    with pytest.raises(ConfigError, match="at chance"):
        simulations.recommend(
            model=nn.Linear(6, 3),
            data={"train": noise, "test": noise},
            public="test",
            examples=500,
            overrides={"privacy.delta": 1e-4} | SHORT,
        )


@pytest.mark.slow
def test_the_warm_up_trains_as_the_recipe_does() -> None:
    """One gradient per client at a rate that only the bound makes sensible: plain training diverged
    at this rate."""
    rate = {
        "training.lr": 1000.0,
        "federation.server_optimizer": "adam",
        "federation.server_lr": 0.05,
    }
    setting: dict[str, object] = {
        "model": nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
        "public": "test",
        "examples": 500,
        "data": {"train": None, "test": PUBLIC},
        "overrides": {"privacy.delta": 1e-4} | SHORT | rate,
    }
    with pytest.raises(ConfigError, match="at chance"):
        simulations.recommend(**setting)  # type: ignore[arg-type]
    setting["overrides"]["trainer.name"] = "fedsgd"  # type: ignore[index]
    advice = simulations.recommend(**setting)  # type: ignore[arg-type]
    assert advice["stages"][-1]["metrics"]["loss"] < 0.5 * advice["stages"][0]["initial_loss"]


def test_updates_that_lower_no_loss_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlgm_lab.recommend.recommend.score", lambda *_: 0.0)
    with pytest.raises(ConfigError, match="never lowers the loss"):
        simulations.recommend(
            model=nn.Linear(6, 3),
            data={"train": None, "test": PUBLIC},
            public="test",
            examples=500,
            overrides={"privacy.delta": 1e-4} | SHORT,
        )


def test_an_example_level_recipe_is_scored_by_its_gradients() -> None:
    overrides = {"federation.rounds": 20} | PRIVATE
    advice = simulations.recommend("dp-sgd-digits", public="digits/public", overrides=overrides)
    assert advice["unit"] == "example"
    assert advice.scores["dimension-adjusted"] < 1.2
    assert "dp-sgd" in advice.advice or "uniform" in advice.advice


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"public": (PUBLIC[0][:4], PUBLIC[1][:4])}, DataError, "at least 16"),
        ({"public": "no-such-set"}, ConfigError, "public: unknown data set"),
        ({"public": {"x": 1}}, DataError, "public: unknown key .x.; its keys: train, test"),
        ({"overrides": {"mechanism.name": "none"}, "public": "test"}, ConfigError, "adds no noise"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        simulations.recommend("digits", **arguments)  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_the_examples_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"does not take a batch of the data 'given'"):
        simulations.recommend(model=nn.Linear(5, 3), public=PUBLIC, overrides=SHORT)


def test_public_examples_without_data_do_not_stand_for_the_default_recipe_s_number_of_examples() -> (
    None
):
    advice = simulations.recommend(model=nn.Linear(6, 3), public=PUBLIC, overrides=SHORT)
    assert advice["assumed"]


def test_traces_are_those_of_the_hessian() -> None:
    x, y = PUBLIC
    outline, _ = outline_of({"test": (x, y), "train": None})
    torch.manual_seed(1)
    own = Own(model=nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), data=outline)
    raw = load("digits").model_dump(exclude_none=True)
    own.into(raw)
    assembly = Assembly(Recipe.model_validate(raw), own)
    module = assembly.model.module()
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
    least = 1e-3 * np.abs(exact).mean()  # a layer's curvature may be negative at such a model
    assert landscape.at(model).traces == pytest.approx(np.maximum(exact, least), rel=1e-3)


def test_the_score_is_progress_squared_over_the_noise_cost() -> None:
    recipe = load("digits", ["mechanism.name=uniform"])
    assembly = Assembly(recipe)
    plan: ReleasePlan = assembly.privacy.first_plan()
    gradient, mean = torch.ones(plan.layers.size), torch.full((plan.layers.size,), -0.5)
    found = Curvature({}, gradient, np.array([2.0, 3.0]))
    expected = (0.5 * plan.layers.size) ** 2 / float((np.array([2.0, 3.0]) * plan.sigma**2).sum())
    assert score(found, mean, plan) == pytest.approx(expected)
    assert score(found, -mean, plan) == 0.0


def test_verdicts() -> None:
    assert (
        verdict({"gaussian": 1.0, "uniform": 1.01}, "client")
        == "use gaussian: no other rule is expected to be better by a fifth."
    )
    better = verdict({"gaussian": 1.0, "uniform": 2.0}, "client")
    assert "uniform is expected to be worth 2.00" in better
    assert "compare both over a few seeds" in better
    assert verdict({"gaussian": 1.0, "uniform": 0.1}, "example").endswith("avoid uniform.")
    assert (
        len({len(line) for line in bars({"gaussian": 1.0, "uniform": 1e-9, "snr-consistent": 1e9})})
        <= 2
    )


def test_a_users_contribution_is_the_mean_of_its_clients() -> None:
    data = Own(data=DataSet.from_arrays(_blobs(900), PUBLIC))
    options = ["federation.clients=40", "data.partition=iid"]
    norms = {}
    for unit, users in (("client", []), ("user", ["privacy.unit=user", "federation.users=10"])):
        assembly = Assembly(load("digits", [*options, *users]), data)
        units = Clients(assembly, most=10**6, share=20)
        _, _, norms[unit] = units.observe(assembly.model.initial(), [])
    clients, users = norms["client"], norms["user"]
    members = clients[: 4 * len(users)].reshape(len(users), 4, -1)
    assert len(clients) // 4 == len(users) >= 4
    assert bool(
        (users < 0.99 * members.mean(dim=1)).all()
    )  # the mean of vectors is shorter than they are
    assert bool((users > 0.2 * members.mean(dim=1)).all())
