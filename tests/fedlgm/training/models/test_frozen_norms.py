"""BatchNorm in evaluation mode, whose statistics are constants that no training changes;
embeddings; wrappers."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import simulations
from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training import models
from fedlgm.training.example_level import ExampleGradients
from fedlgm.training.models.requirements import freeze_norms_, require_stateless

X, Y = np.random.default_rng(0).normal(size=(200, 5)).astype("float32"), np.arange(200) % 2
DATA = {"train": (X, Y), "test": (X[:50], Y[:50])}
SHORT = ["federation.rounds=2", "run.seed=7", "privacy.accountant=rdp", "privacy.epsilon=1"]
CLIENTS = [*SHORT, "federation.clients=20"]
EXAMPLES = [*SHORT, "training.batch_size=32"]


def normed() -> nn.Sequential:
    """A model whose BatchNorm has statistics that no batch of the data has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model[1].running_mean.copy_(torch.tensor([3.0, -2.0, 0.5, 1.0]))
    model[1].running_var.fill_(4.0)
    model[1].eval()
    return model


class Keeping(nn.Module):
    """A model whose own `train` leaves its BatchNorm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = normed()

    def train(self, mode: bool = True) -> Keeping:
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Switching(Keeping):
    """A model that puts its BatchNorm into training mode while it is called."""

    def forward(self, x: Tensor) -> Tensor:
        self.body[1].training = True
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "recipe", "changes"),
    [
        (normed, "digits", CLIENTS),
        (Keeping, "dp-sgd-digits", EXAMPLES),
        (Switching, "digits", CLIENTS),
        (Switching, "dp-sgd-digits", EXAMPLES),
    ],
)
def test_constant_statistics_stay_constant(make, recipe, changes, tmp_path) -> None:
    """Every BatchNorm was refused, also one that is not trained."""
    model = make()
    before = {name: value.clone() for name, value in model.named_buffers()}
    result = simulations.simulate(
        recipe, model=model, data=DATA, overrides=changes, run_dir=tmp_path / "run"
    )
    after = result.model()
    for made in (model, after):
        assert all(torch.equal(value, before[name]) for name, value in made.named_buffers())
    norm = dict(after.named_modules())["1" if make is normed else "body.1"]
    x = torch.randn(3, 4)
    plain = copy.deepcopy(dict(model.named_modules())["1" if make is normed else "body.1"]).eval()
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm.train()(x), plain(x))  # the same function in every mode
    assert type(plain) is nn.BatchNorm1d  # the user's own model is not changed


def test_its_gradients_are_those_of_single_examples() -> None:
    model, x, y = normed(), torch.from_numpy(X[:7]), torch.from_numpy(Y[:7])
    freeze_norms_(model)
    layers = LayerTable.from_module(model)
    total = ExampleGradients(model.train(), layers).sum(x, y, _unclipped()).total
    weights = list(model.parameters())
    gradients = [
        torch.autograd.grad(_loss(model, x[i : i + 1], y[i : i + 1]), weights) for i in range(7)
    ]
    alone = sum(torch.cat([part.flatten() for part in gradient]) for gradient in gradients)
    assert torch.allclose(total.float(), alone, atol=1e-5)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


def _unclipped():
    from fedlgm.training.example_level.scaling import of_style

    return of_style("flat", float("inf"), 1)


def test_every_other_batch_norm_is_refused() -> None:
    trained = normed().train()
    evaluated = normed().eval()  # as `from_pretrained` returns every model
    derived = nn.Sequential(nn.Linear(5, 4), type("Own", (nn.BatchNorm1d,), {})(4).eval())
    for model in (trained, evaluated, derived):
        with pytest.raises(
            ConfigError,
            match=r"running_mean' would follow private data .* may stay if it is in evalu",
        ):
            models.build(model, in_shape=(5,), classes=2)
    with pytest.raises(ConfigError, match="would follow private data"):
        require_stateless(normed())
    batch = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(
        ConfigError, match="mixes the examples of a batch"
    ):  # it takes the batch's in every mode
        ExampleGradients(batch, LayerTable.from_module(batch))


def test_a_frozen_norm_is_copied_and_stored() -> None:
    model = models.build(normed(), in_shape=(5,), classes=2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for made in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        require_stateless(made.train())
    assert model.state_dict().keys() == normed().state_dict().keys()


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(9, 3, sparse=sparse), nn.Linear(15, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).flatten(1))


def test_sparse_embeddings_train_as_dense_ones(tmp_path) -> None:
    """It ended in "copy_() between dense and sparse Tensors is not implemented"."""
    x = np.random.default_rng(0).integers(0, 9, size=(200, 5))
    data = {"train": (x, Y), "test": (x, Y)}
    made = [
        simulations.simulate(
            model=Words(sparse), data=data, overrides=CLIENTS, run_dir=tmp_path / str(sparse)
        )
        for sparse in (True, False)
    ]
    assert made[0]["model_sha256"] == made[1]["model_sha256"]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], [5] * len(x), batch_first=True)
        return self.out(self.read(packed)[1][0])


def test_packed_sequences_are_refused_at_example_level(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"read \(GRU\) takes a packed sequence, .*: pass padded sequences"
    ):
        simulations.simulate(
            "dp-sgd-digits", model=Packed(), data=DATA, overrides=EXAMPLES, run_dir=tmp_path / "run"
        )
    assert list(tmp_path.iterdir()) == []


def test_wrappers_of_opacus_are_refused() -> None:
    opacus = pytest.importorskip("opacus")
    with pytest.raises(ConfigError, match=r"is wrapped by Opacus .*: pass the plain nn.Module"):
        models.build(opacus.GradSampleModule(nn.Linear(5, 2)), in_shape=(5,), classes=2)
