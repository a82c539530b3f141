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


def guarantee_of(
    recipe: Recipe, sizes: Mapping[str, int], *, amplified: bool, multiplier: float | None = None
) -> Guarantee:
    """The guarantee of a recipe's run with one of the library's mechanisms.

    The words do not depend on the model's values, and on the amount of noise only where they state a second epsilon
    (`NoisedBy.against`). So nothing is calibrated, built or loaded.

    Args:
        recipe: the recipe.
        sizes: d_j of the mechanism's layers, by name.
        amplified: whether steps sample fewer than all examples; used if the server adds noise to steps, because the
            recipe does not give the number of examples.
        multiplier: of the run's plan; None: calibrated if a second epsilon is stated.

    Example:
        >>> from simulations.config.recipe import load
        >>> guarantee_of(load("digits"), {"fc1": 100, "fc2": 10}, amplified=False).status
        'proven'
    """
    mechanism, layers = recipe.mechanism.build(), LayerTable.from_sizes(dict(sizes))
    batch = recipe.training.batch_size
    facts = facts_of(recipe, 2 * batch if amplified else batch)
    if multiplier is None:
        stated = facts.noised_by.readers_epsilon(facts, 0) is not None
        multiplier = mechanism.calibrate(facts) if stated else 1.0
    facts = facts.with_multiplier(multiplier)
    start = Transcript.start(torch.zeros(1).expand(layers.size))
    return Method(mechanism, layers, facts).plan(start).guarantee
