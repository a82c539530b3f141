"""How many clients an accelerator trains at once, and in which blocks they arrive."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from simulations.config import decided
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.run_model import RunModel

ON = "training.vectorize=on"


def settled(
    *overrides: str, recipe: str = "digits", device: str = "cuda"
) -> tuple[str, int | None, int]:
    """`vectorize`, `width` and `block_size` of a run on a device."""
    with patch.object(RunModel, "device", torch.device(device)):
        made = decided.resolve_auto(Assembly(recipes.load(recipe, overrides)), workers=1).recipe
    return made.training.vectorize, made.training.width, made.run.block_size


def test_width_and_blocks_follow_the_device() -> None:
    assert settled(ON) == ("on", 16, 16)
    assert settled(ON, "training.width=40") == ("on", 40, 40)
    assert settled(ON, "training.width=2", "run.block_size=12") == ("on", 2, 12)
    assert settled(ON, "run.block_size=64") == ("on", 64, 64)
    assert settled(ON, device="cpu") == ("on", None, 8)


def test_clients_are_trained_side_by_side_unless_the_recipe_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        decided, "fastest", lambda makers, *arguments, **options: (list(makers)[-1], {})
    )
    assert settled() == ("on", 16, 16)
    assert settled("training.vectorize=off")[0] == "off"
    assert settled("training.kernel=auto") == ("on", 16, 16)
    assert settled(device="cpu") == ("off", None, 8)


def test_a_trainer_without_vectorised_form_trains_one_client_after_another() -> None:
    assert settled("trainer={name='bfloat16'}")[0] == "off"


def test_the_example_level_engine_has_its_own_batches() -> None:
    assert settled(recipe="dp-sgd-digits") == ("off", None, 8)
