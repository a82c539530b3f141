"""Public names called with arguments of wrong types: each takes them, or refuses them in one
sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import clients
import fedlgm
import fedlgm_lab.attacks
import simulations
import strategies
from clients import PrivateClientApp
from fedlgm import mechanisms, privacy
from fedlgm.errors import FedlgmError
from fedlgm.extension.loader import named_arguments
from fedlgm.mechanisms import lm_dp_sgd


@pytest.mark.parametrize(
    "package",
    [simulations, privacy, fedlgm.training.example_level, mechanisms],
    ids=lambda p: p.__name__,
)
def test_every_public_function_with_named_arguments_lists_them(package):
    found = {name: getattr(package, name) for name in package.__all__}
    named = {
        name: function
        for name, function in found.items()
        if inspect.isfunction(function)
        and any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(function).parameters.values())
    }
    assert named
    for name, function in named.items():
        with pytest.raises(
            FedlgmError, match=f"{name}: too many positional arguments; it takes .*, and by name "
        ):
            function(*range(20))


PACKAGES = [
    *(
        fedlgm,
        fedlgm_lab.attacks,
        fedlgm_lab.audits,
        fedlgm.noise.correlation,
        fedlgm.data,
        fedlgm.training.example_level,
        mechanisms,
    ),
    *(
        fedlgm.training.models,
        privacy,
        fedlgm.training.tasks,
        fedlgm.training,
        simulations,
        clients,
        strategies,
    ),
]


def called_with(wrong: Any, found: Any) -> str:
    """The message of a public name all of whose required arguments are `wrong`; empty if it takes
    them."""
    needed = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
    named = {p.name: wrong for p in needed if p.kind is p.KEYWORD_ONLY}
    placed = [wrong for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    try:
        if placed or named:
            found(*placed, **named)
    except FedlgmError as error:
        return str(error)
    except Exception as error:
        return f"\n{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "wrong", [object(), "text", 7, [1, "a"]], ids=["object", "text", "number", "list"]
)
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_public_name_takes_wrong_types_or_refuses_them_in_one_sentence(
    package, wrong, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    said = {
        name: called_with(wrong, found)
        for name, found in ((name, getattr(package, name)) for name in package.__all__)
        if (inspect.isfunction(found) or isinstance(found, type))
        and not (inspect.isabstract(found) or getattr(found, "_is_protocol", False))
        and found is not simulations.Recipe  # pydantic's own message, one line per section
    }
    assert {name: text for name, text in said.items() if "\n" in text} == {}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fedlgm.KeyRing("seed"), "KeyRing: root must be a whole number, got 'seed'"),
        (
            lambda: fedlgm.planning.allocation.allocate([1.0], "uniform", [3], 1.0),
            (
                "allocate: strategy must be a string, got [1.0]; clip must be a sequence of "
                "numbers, "
                "got 'uniform'"
            ),
        ),
        (
            lambda: lm_dp_sgd.aggregate(torch.ones(4, 3), 1.0),
            "aggregate: grads must be a sequence of tensors, got a tensor",
        ),
        (
            lambda: lm_dp_sgd.aggregate([torch.ones(4, 3)], "1"),
            ("aggregate: clip must be a number, got '1'"),
        ),
        (
            lambda: fedlgm.training.example_level.clipped_sum(
                nn.Linear(2, 2), np.eye(2), np.eye(2)[0], clip=1.0, layers=None
            ),
            "clipped_sum: x must be a tensor or a sequence of tensors, got a NumPy array; y",
        ),
        (
            lambda: PrivateClientApp(nn.Linear(5, 2), "module"),
            "PrivateClientApp: too many positional arguments; it takes model, and by name mods",
        ),
        (
            lambda: simulations.Recipe("digits"),
            "a Recipe takes its sections by name; load_recipe('digits') reads a recipe by its name",
        ),
        (
            lambda: mechanisms.register(3.5, mechanisms.LayerwiseGaussian),
            "the name of a mechanism must be a string, got 3.5",
        ),
        (
            lambda: fedlgm.LayerTable.from_module(nn.Linear(5, 2), {"weight": "w"}.__getitem__),
            "group_by: KeyError: 'bias'",
        ),
        (
            lambda: fedlgm.planning.allocation.spread([0.5, 0.5], [1.0], 1.0),
            "clip and share must be two equally long lists",
        ),
        (
            lambda: fedlgm.training.tasks.auc(np.zeros(3), np.zeros(2)),
            "auc takes one score and one target per row",
        ),
    ],
)
def test_a_wrong_type_is_named_with_the_right_one(make, says):
    with pytest.raises(FedlgmError) as caught:
        make()
    assert str(caught.value).startswith(says)


def test_an_error_inside_a_call_whose_arguments_fit_keeps_its_type():
    def rule(s, d):
        raise ZeroDivisionError

    @named_arguments
    def apply(rule: Callable[..., Any], count: int) -> Any:
        return rule(1, 2)

    with pytest.raises(ZeroDivisionError):
        apply(rule, 3)
    with pytest.raises(FedlgmError, match="count must be a whole number, got '3'"):
        apply(rule, "3")
