"""A run's guarantee in words, derived again from its recipe.

A summary is a plain file: anyone who can write to the run's folder can change its words. The recipe is part of the
identity of the ledger's owner, so readers take the words from it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedlgm.extension import is_object, is_reference
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.method import Method
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.transcript import Transcript
from simulations.config.facts import facts_of
from simulations.config.recipe import Recipe


def is_own(recipe: Recipe) -> bool:
    """Whether the mechanism is a user's: only its plans then state its guarantee."""
    return is_object(recipe.mechanism.name) or is_reference(recipe.mechanism.name)


def guarantee_of(recipe: Recipe, sizes: Mapping[str, int], *, amplified: bool) -> Guarantee:
    """The guarantee of a recipe's run with one of the library's mechanisms.

    The words depend on neither the amount of noise nor the model's values, so nothing is calibrated, built or loaded.

    Args:
        recipe: the recipe.
        sizes: d_j of the mechanism's layers, by name.
        amplified: whether steps sample fewer than all examples; used if the server adds noise to steps, because the
            recipe does not give the number of examples.

    Example:
        >>> from simulations.config.recipe import load
        >>> guarantee_of(load("digits"), {"fc1": 100, "fc2": 10}, amplified=False).status
        'proven'
    """
    mechanism, layers = recipe.mechanism.build(), LayerTable.from_sizes(dict(sizes))
    batch = recipe.training.batch_size
    facts = facts_of(recipe, 2 * batch if amplified else batch).with_multiplier(1.0)
    start = Transcript.start(torch.zeros(1).expand(layers.size))
    return Method(mechanism, layers, facts).plan(start).guarantee
