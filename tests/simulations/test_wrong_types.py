"""Values of wrong types that Python itself would not name: one sentence each."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

import fedlgm
import simulations
from fedlgm import mechanisms
from fedlgm.errors import FedlgmError


@pytest.mark.parametrize(
    ("make", "says"),
    [
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
            lambda: fedlgm.allocation.spread([0.5, 0.5], [1.0], 1.0),
            "clip and share must be two equally long lists",
        ),
        (
            lambda: fedlgm.tasks.auc(np.zeros(3), np.zeros(2)),
            "auc takes one score and one target per row",
        ),
    ],
)
def test_a_wrong_value_is_named_with_the_right_one(make, says):
    with pytest.raises(FedlgmError) as caught:
        make()
    assert str(caught.value).startswith(says)


def test_wrong_arguments_are_pythons_own_errors():
    with pytest.raises(TypeError, match="unexpected keyword argument 'taks'"):
        fedlgm.LayerTable.from_module(nn.Linear(5, 2), taks=1)
