"""The server's step: bundled ones, and those of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlgm.errors import ConfigError
from strategies.server_optimizer import restore, server_step, state_of

MODEL, MEAN = torch.zeros(3), torch.ones(3)


class Own:
    """A step whose methods call the given functions."""

    def __init__(self, step: Callable[[Tensor, Tensor], Any], state: Callable[[], Any] = dict) -> None:
        self._functions = step, state

    def step(self, model: Tensor, mean_update: Tensor) -> Any:
        return self._functions[0](model, mean_update)

    def state(self) -> Any:
        return self._functions[1]()

    def restore(self, model: Tensor, state: dict[str, Tensor]) -> None:
        self._functions[1]()


def no_memory(*_: Any) -> Any:
    raise MemoryError("no room")


def refused(*_: Any) -> Any:
    raise ConfigError("mine: beta must be below 1")


def broken(*_: Any) -> Any:
    return {}["momentum"]


class TestWhatAUsersOwnRaises:
    def test_is_one_message_with_its_line(self) -> None:
        with pytest.raises(ConfigError, match=r"^server optimizer '<Own>': .*\(test_server_optimizer.py, line \d+\)$"):
            server_step(Own(broken), 1.0, 0.0).step(MODEL, MEAN)
        step = server_step(Own(torch.add, broken), 1.0, 0.0)
        for method in (lambda: state_of(step), lambda: restore(step, MODEL, {})):
            with pytest.raises(ConfigError, match=r"^server optimizer '<Own>': .*test_server_optimizer.py"):
                method()

    @pytest.mark.parametrize(("function", "error"), [(no_memory, MemoryError), (refused, ConfigError)])
    def test_memory_and_messages_pass_unchanged(self, function: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"^(no room|mine: beta must be below 1)$"):
            server_step(Own(function), 1.0, 0.0).step(MODEL, MEAN)
        with pytest.raises(error, match=r"^(no room|mine: beta must be below 1)$"):
            server_step(lambda lr, momentum: function(), 1.0, 0.0)

    def test_arguments_that_do_not_fit_differ_from_errors_inside(self) -> None:
        with pytest.raises(ConfigError, match=r"'<made>' is made by \(lr, momentum\): too many positional arguments$"):
            server_step(made, 1.0, 0.0)
        with pytest.raises(ConfigError, match=r"^server optimizer '<failing>': TypeError: .*line \d+\)$"):
            server_step(failing, 1.0, 0.0)


def made(lr: float) -> Own:
    return Own(torch.add)


def failing(lr: float, momentum: float) -> Own:
    return len(lr)  # type: ignore[arg-type,return-value]
