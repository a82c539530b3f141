"""Copies of models: faithful, or refused with the attribute's name."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import simulations
from clients.mod import PrivateUpdates
from fedlgm.errors import ConfigError
from fedlgm.training.models.copies import copy_model, require_faithful_copies
from strategies import PrivateFedAvg
from tests.support.own_objects import DATA, SMALL


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


class Closed(Net):
    def __init__(self) -> None:
        super().__init__()
        body = self.body
        self.hidden = lambda x: torch.tanh(body(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))


class Partly(Net):
    """Copies itself, and gives its layer away."""

    def __deepcopy__(self, memo: Any) -> Partly:
        made = Partly()
        made.load_state_dict(self.state_dict())
        vars(made)["away"] = [self.body]
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(vars(self).get("away", [self.body])[0](x)))


class Hidden(Partly):
    """As above, where no attribute leads."""

    def __deepcopy__(self, memo: Any) -> Hidden:
        made = Hidden()
        made.load_state_dict(self.state_dict())
        globals()["LAYERS"][id(made)] = self.body
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(globals()["LAYERS"].get(id(self), self.body)(x)))


LAYERS: dict[int, nn.Module] = {}


def hooked() -> nn.Module:
    net = Net()
    net.head.register_forward_hook(lambda _module, _given, out: out + net.head.bias)
    return net


def shared() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    net[1].weight = nn.Parameter(net[0].weight.data)
    return net


def pruned() -> nn.Module:
    net = Net()
    prune.l1_unstructured(net.body, "weight", amount=0.5)
    return net


def normalised() -> nn.Module:
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.body = nn.utils.weight_norm(net.body)
    return net


def locked() -> nn.Module:
    net = Net()
    net.body.lock = threading.Lock()  # type: ignore[assignment]
    return net


def with_history() -> nn.Module:
    net = Net()
    net.double = 2 * net.head.weight  # type: ignore[assignment]
    return net


BROKEN = {
    "closure": (Closed, "'hidden' refers to the original's module 'body'"),
    "hook": (hooked, "'head._forward_hooks.* refers to the original's"),
    "away": (Partly, "'away"),
    "shared": (shared, "'0.weight' and '1.weight' of the model share memory"),
    "pruned": (pruned, "'body.weight' is a tensor with a gradient history"),
    "weight_norm": (normalised, "'body.weight' is a tensor with a gradient history"),
    "lock": (locked, "'body.lock' is lock"),
    "history": (with_history, "'double' is a tensor with a gradient history"),
}


@pytest.mark.parametrize(("make", "match"), BROKEN.values(), ids=BROKEN)
def test_a_model_whose_copy_would_not_be_faithful_is_refused(
    make: Any, match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        copy_model(make())
    with pytest.raises(ConfigError, match=match):
        simulations.simulate(model=make(), data=DATA, overrides=SMALL, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=match):
        PrivateUpdates(make())
    with pytest.raises(ConfigError, match=match):
        PrivateFedAvg(
            make(), epsilon=8, delta=0.01, clients=10, rounds=1, ledger=tmp_path / "ledger.sqlite"
        )
    assert not (tmp_path / "ledger.sqlite").exists()


def test_parameters_in_one_memory_are_refused_in_a_model_that_a_function_makes(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="share memory"):
        simulations.simulate(model=shared, data=DATA, overrides=SMALL, run_dir=tmp_path / "run")


def test_a_copy_that_computes_with_the_original_s_weights_is_found_by_its_gradients() -> None:
    net, x = Hidden(), torch.randn(4, 5)
    copy_model(net)  # no attribute shows it
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ConfigError, match=r"does not follow its own 'body\.weight'"):
        require_faithful_copies(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_ordinary_models_are_copied() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    for net in (tied, parametrised, nn.LSTM(4, 2), nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))):
        made = copy_model(net)
        assert [name for name, _ in made.named_parameters()] == [
            name for name, _ in net.named_parameters()
        ]
    for net in (tied, parametrised):
        require_faithful_copies(net, torch.randn(3, 4))
    assert copy_model(tied)[1].weight is not tied[0].weight


def test_a_copy_keeps_what_shares_one_parameter() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    made = copy_model(tied)
    assert made[1].weight is made[0].weight


def test_threads_may_share_a_model() -> None:
    """A trial changes weights for a moment, in which no other thread may copy the model."""
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)), torch.ones(2, 64)
    before, failures = net[0].weight.detach().clone(), list[Exception]()

    def try_copies() -> None:
        try:
            for _ in range(40):
                require_faithful_copies(net, x)
                assert torch.equal(copy_model(net)[0].weight, before)
        except (AssertionError, ConfigError) as error:
            failures.append(error)

    threads = [threading.Thread(target=try_copies) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
