"""The server's step: bundled ones, and those of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import simulations
from fedlgm.errors import ConfigError, DivergedError
from strategies import server_optimizer
from strategies.server_optimizer import server_step

MODEL, MEAN = torch.zeros(3), torch.ones(3)


class Own:
    """A step whose methods call the given functions."""

    def __init__(
        self, step: Callable[[Tensor, Tensor], Any], state: Callable[[], Any] = dict
    ) -> None:
        self._functions = step, state

    def step(self, model: Tensor, mean_update: Tensor) -> Any:
        return self._functions[0](model, mean_update)

    def state(self) -> Any:
        return self._functions[1]()

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        self._functions[1]()


def no_memory(*_: Any) -> Any:
    raise MemoryError("no memory")


def refused(*_: Any) -> Any:
    raise ConfigError("mine: beta must be below 1")


def broken(*_: Any) -> Any:
    return {}["momentum"]


class TestWhatAUsersOwnRaises:
    def test_is_one_message_with_its_line(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"^server optimizer '<Own>': .*\(test_server_optimizer.py, line \d+\)$",
        ):
            server_step(Own(broken), 1.0, 0.0).step(MODEL, MEAN)
        step = server_step(Own(torch.add, broken), 1.0, 0.0)
        for method in (lambda: step.state(), lambda: step.restore(MODEL, {})):
            with pytest.raises(
                ConfigError, match=r"^server optimizer '<Own>': .*test_server_optimizer.py"
            ):
                method()

    @pytest.mark.parametrize(
        ("function", "error"), [(no_memory, MemoryError), (refused, ConfigError)]
    )
    def test_memory_and_messages_pass_unchanged(
        self, function: Any, error: type[Exception]
    ) -> None:
        with pytest.raises(error, match=r"^(no memory|mine: beta must be below 1)$"):
            server_step(Own(function), 1.0, 0.0).step(MODEL, MEAN)
        with pytest.raises(error, match=r"^(no memory|mine: beta must be below 1)$"):
            server_step(lambda lr, momentum: function(), 1.0, 0.0)

    def test_arguments_that_do_not_fit_differ_from_errors_inside(self) -> None:
        with pytest.raises(
            ConfigError,
            match=r"'<made>' must be made by a call with \(lr, momentum\): too many positional arguments$",
        ):
            server_step(made, 1.0, 0.0)
        with pytest.raises(
            ConfigError, match=r"^server optimizer '<failing>': TypeError: .*line \d+\)$"
        ):
            server_step(failing, 1.0, 0.0)


def made(lr: float) -> Own:
    return Own(torch.add)


def failing(lr: float, momentum: float) -> Own:
    return len(lr)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("name", server_optimizer.names())
def test_every_step_with_a_name_continues_with_its_state(name: str) -> None:
    first, again = (server_step(name, lr=0.1, momentum=0.9) for _ in range(2))
    update, other = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    model = first.step(torch.zeros(2), update)
    again.restore(model, first.state())
    assert torch.equal(again.step(model, other), first.step(model, other))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_model_that_is_not_finite_ends_training(
    value: float, federate: Callable[..., Any]
) -> None:
    step = server_step(
        Own(lambda model, mean: (model + mean).index_fill(0, torch.tensor([1]), value)), 1.0, 0.0
    )
    federation = federate(lambda client: torch.ones(3), {"a": 3}, optimizer=step)
    start = federation.strategy.transcript
    with pytest.raises(
        DivergedError,
        match=r"^training diverged in round 1: .* 1 of the model's 3 values .*server_lr",
    ):
        federation.run(1)
    assert federation.strategy.transcript is start  # the last model that can be used
    assert federation.records == []
    assert federation.ledger.rounds() == 1  # it was released before the step


def test_contributions_that_are_not_finite_end_nothing(federate: Callable[..., Any]) -> None:
    """They count as zero: that a run goes on or stops tells nothing of a client."""
    federation = federate(
        lambda client: torch.full((3,), float("nan") if client == 2 else 0.1), {"a": 3}
    )
    assert bool(torch.isfinite(federation.run(1)).all())
    assert federation.records[0].discarded == 1


class Halved:
    """A user's step, made from the rate and the momentum."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr = lr

    def step(self, model: Tensor, mean_update: Tensor) -> Tensor:
        return model + self.lr / 2 * mean_update


class TestARegisteredName:
    def test_makes_the_step_in_runs_of_both_units(self, tmp_path: Path) -> None:
        server_optimizer.register("halved", Halved)
        server_optimizer.register("halved", Halved)  # as a notebook's cell does that runs again
        assert server_optimizer.names()[-1] == "halved"
        assert server_step("halved", 1.0, 0.0).step(MODEL, MEAN).tolist() == [0.5, 0.5, 0.5]
        for base in ("digits", "dp-sgd-digits"):
            changes = ["federation.rounds=2"]
            result = simulations.simulate(
                base,
                overrides=[*changes, "federation.server_optimizer=halved"],
                run_dir=tmp_path / base,
            )
            same = simulations.simulate(
                base,
                overrides=changes,
                server_optimizer=Halved,
                run_dir=tmp_path / f"{base}-object",
            )
            plain = simulations.simulate(
                base, overrides=changes, run_dir=tmp_path / f"{base}-plain"
            )
            assert result["model_sha256"] == same["model_sha256"] != plain["model_sha256"]

    def test_has_a_usual_rate_for_federations_that_state_none(self) -> None:
        assert [
            server_optimizer.usual_lr(name) for name in ("sgd", "momentum", "adam", "yogi")
        ] == [
            1.0,
            0.1,
            0.01,
            0.01,
        ]
        assert server_optimizer.usual_lr(Own(torch.add)) == 1.0
        server_optimizer.register("halved", Halved, usual_lr=0.5)
        assert server_optimizer.usual_lr("halved") == 0.5
        with pytest.raises(ConfigError, match="'other': usual_lr must be finite and positive"):
            server_optimizer.register("other", Halved, usual_lr=0)

    def test_belongs_to_one_step(self) -> None:
        with pytest.raises(ConfigError, match="there is a server optimizer 'yogi' already"):
            server_optimizer.register("yogi", Halved)
        with pytest.raises(ConfigError, match="'three': it must be a class or function"):
            server_optimizer.register("three", 3)  # type: ignore[arg-type]
