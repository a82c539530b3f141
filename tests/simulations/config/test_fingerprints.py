"""Hashes of Python objects: the same in every process, another one for whatever makes another
run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from simulations.config.fingerprints import object_digest

MODULE = """
import functools
import numpy as np
import torch


class Base:
    def step(self, x):
        return x + 1


class Step(Base):
    def __init__(self, lr=0.5, names=("a", "b")):
        self.lr, self.names, self.weights, self.own = lr, set(names), torch.ones(3), self

    @functools.cached_property
    def slow(self):
        return object()


def loss(x, scale=2.0, words=frozenset({"one", "two", "three"})):
    return x * scale if x in {"p", "q", "r"} else sum(y for y in x)


found = [Step(), Step, loss, functools.partial(loss, scale=3.0), Step().step, np.arange(5), len]
"""


def digests(text: str) -> list[str]:
    """Of the objects that a module makes; it has no file, as what is typed at a prompt has none."""
    names: dict[str, Any] = {"__name__": "typed"}
    exec(text, names)
    return [object_digest(value) for value in names["found"]]


@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_they_are_the_same_in_another_process(seed: str) -> None:
    """Whose strings have other hashes, so that its sets have another order."""
    code = "from tests.simulations.config.test_fingerprints import MODULE, digests; print(*digests(MODULE))"
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    root = Path(__file__).parents[3]
    told = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == digests(MODULE)


def test_every_object_has_one_of_its_own() -> None:
    assert len(set(digests(MODULE))) == 7


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lr=0.5", "lr=0.6"),
        ('names=("a", "b")', 'names=("a", "c")'),
        ("torch.ones(3)", "torch.zeros(3)"),
        ("scale=2.0", "scale=2.5"),
        ('"three"', '"four"'),
        ("x * scale", "x + scale"),
        ("scale=3.0", "scale=3.5"),
        ("np.arange(5)", "np.arange(6)"),
    ],
)
def test_a_change_is_noticed(old: str, new: str) -> None:
    assert digests(MODULE.replace(old, new)) != digests(MODULE)


@dataclass(frozen=True)
class Options:
    values: np.ndarray
    turn: Any = None


def test_long_arrays_are_read_to_their_end() -> None:
    """Their text leaves out the middle."""
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1.0
    assert repr(Options(one)) == repr(Options(other))
    assert object_digest(Options(one)) != object_digest(Options(other))


def test_what_is_computed_and_what_steps_change_does_not_count() -> None:
    class Counting:
        def __init__(self, lr: float) -> None:
            self.lr, self.done, self.moved = lr, 0, torch.zeros(2)

        @functools.cached_property
        def slow(self) -> object:
            return object()

    fresh, used = Counting(0.1), Counting(0.1)
    _ = used.slow
    assert object_digest(fresh) == object_digest(used)
    used.done, used.moved = 3, torch.ones(2)
    assert object_digest(fresh) != object_digest(used)
    assert object_digest(fresh, state=False) == object_digest(used, state=False)
    assert object_digest(fresh, state=False) != object_digest(Counting(0.2), state=False)


def test_functions_in_one_line_are_told_apart() -> None:
    one, other, same = lambda x: x + 1, lambda x: x + 2, lambda x: x + 1
    assert object_digest(one) == object_digest(same) != object_digest(other)
