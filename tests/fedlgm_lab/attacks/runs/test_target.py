"""What attacks see of a recipe."""

from __future__ import annotations

import torch

from fedlgm_lab.attacks.runs.target import Images, Target
from simulations.config.assembly import Assembly


def test_a_federation_on_other_pixels_is_attacked_on_the_usual_ones(tiny) -> None:
    recipe = tiny(data={"pixels": [0.25, 2.0]})
    own, moved = Assembly(recipe), Target(recipe).assembly(reconstructs=True)
    x, usual = Images.of(own.data.dataset).train[0], Images.of(moved.data.dataset).train[0]
    assert (float(usual.min()), float(usual.max())) == (-1.0, 1.0)
    assert (float(x.min()), float(x.max())) == (0.25, 2.0)
    torch.testing.assert_close(moved.model.module()(usual), own.model.module()(x))
    assert torch.equal(
        own.model.layers.flatten(own.model.module()),
        moved.model.layers.flatten(moved.model.module()),
    )
