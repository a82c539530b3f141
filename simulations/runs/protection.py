"""A run's guarantee in words, derived again from its recipe.

Summary and checkpoints are plain files, and anyone who can write to the run's folder can change
their words. The recipe is part of the identity of the ledger's owner, so readers take the words
from it. A user's mechanism states its guarantee in the ledger's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from fedlgm.errors import LedgerError
from fedlgm.extension.loader import is_object, is_reference
from fedlgm.mechanisms.method import Method
from fedlgm.planning import charging
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.charge import Charge
from fedlgm.privacy.cost import Cost
from fedlgm.privacy.guarantee import Guarantee
from simulations.config.facts import facts_of
from simulations.config.recipe import Recipe


def is_own(recipe: Recipe) -> bool:
    """Whether the mechanism is a user's. Its plans then state its guarantee, which the ledger's
    rows keep.
    """
    return is_object(recipe.mechanism.name) or is_reference(recipe.mechanism.name)


def guarantee_of(
    recipe: Recipe, sizes: Mapping[str, int], *, amplified: bool, multiplier: float | None = None
) -> Guarantee:
    """The guarantee of a recipe's run with one of the library's mechanisms.

    The words do not depend on the model's values. They depend on the amount of noise only if they
    state a second epsilon (`NoisedBy.against`). So nothing is calibrated, built or loaded.

    Args:
        recipe: the recipe.
        sizes: d_j of the mechanism's layers, by name.
        amplified: whether steps sample fewer than all examples; used if the server adds noise to
            steps, because the recipe does not give the number of examples.
        multiplier: noise multiplier of the run's plan; None calibrates it if a second epsilon is
            stated.

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


def settled_multiplier(
    recipe: Recipe,
    sizes: Callable[[], Mapping[str, int]],
    stated: float | None,
    first: Charge,
    where: str,
) -> float | None:
    """The run's noise multiplier, from which a second epsilon follows. It is taken from the ledger,
    or otherwise from a checkpoint.

    Args:
        recipe: recipe of the run.
        sizes: see `guarantee_of`; called if a mechanism's noise changes over the rounds.
        stated: noise multiplier of a checkpoint's plan; None without one.
        first: first row of the run's rounds.
        where: the run's folder, for the message.

    Raises:
        LedgerError: rounds with the stated multiplier would have another cost.
    """
    charged = _charged_multiplier(recipe, sizes, first)
    if charged is None or stated is None:
        return stated if charged is None else charged
    if not math.isclose(stated, charged, rel_tol=1e-6):
        raise LedgerError(
            f"a checkpoint of {where} states a noise multiplier of {stated:.6g}, by which round "
            f"{first.round} would have another cost than in the ledger: the checkpoint was changed; "
            "restore `checkpoints/` from a backup"
        )
    return stated


def _charged_multiplier(
    recipe: Recipe, sizes: Callable[[], Mapping[str, int]], first: Charge
) -> float | None:
    """The noise multiplier by which a row was charged; None if rows do not state it."""
    facts, charged = facts_of(recipe, 2 * recipe.training.batch_size), Cost.of(first.event)
    if charging.of(facts).joint or charged.law != "gaussian":  # one mechanism: rows are increments
        return None
    if facts.shares is not None:
        level = 1.0  # of every round, whatever the mechanism; and no other run has a second epsilon
    elif is_own(recipe):
        return None
    else:
        layers = LayerTable.from_sizes(dict(sizes()))
        level = math.sqrt(recipe.mechanism.build().costs(layers, facts.rounds)[first.round - 1])
    return charged.figure * level * facts.moved
