"""A run's guarantee in words, derived again from its recipe.

The summary and the checkpoints are plain files, so anyone who can write to the run's folder can
change the words in them. Readers therefore take the words from the recipe, whose hash is part of
the ledger's identity. If the mechanism is a user's own, the ledger's rows state its guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from fedlgm import mechanisms
from fedlgm.errors import LedgerError
from fedlgm.mechanisms.method import Method
from fedlgm.planning import charging
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.charge import Charge
from fedlgm.privacy.cost import Cost
from fedlgm.privacy.guarantee import Guarantee
from simulations.config.facts import facts_of
from simulations.config.recipe import Recipe


def guarantee_of(
    recipe: Recipe, sizes: Mapping[str, int], *, amplified: bool, multiplier: float | None = None
) -> Guarantee:
    """The guarantee of a recipe's run with one of the library's mechanisms.

    The words do not depend on the model's values, so no model is built and no data are loaded. The
    words depend on the amount of noise only if they state a second epsilon (`NoisedBy.against`).
    Without a second epsilon, no noise is calibrated.

    Args:
        recipe: the recipe.
        sizes: d_j of the mechanism's layers, by name.
        amplified: whether a step samples fewer than all examples. This is used if the server adds
            noise to steps, because the recipe does not state the number of examples.
        multiplier: noise multiplier of the run's plan. If it is None and the words state a second
            epsilon, the noise is calibrated.

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
    """The run's noise multiplier, which determines a second epsilon. The ledger or a checkpoint
    states it. If both state it, they must agree.

    Args:
        recipe: recipe of the run.
        sizes: function that returns the `sizes` of `guarantee_of`. It is called only if the sizes
            are needed.
        stated: noise multiplier of a checkpoint's plan; None without one.
        first: first row of the run's rounds.
        where: the run's folder, for the message.

    Raises:
        LedgerError: with the stated multiplier, a round would have another cost than in the ledger.
    """
    charged = _charged_multiplier(recipe, sizes, first)
    if charged is None or stated is None:
        return stated if charged is None else charged
    if not math.isclose(stated, charged, rel_tol=1e-6):
        raise LedgerError(
            f"a checkpoint of {where} states a noise multiplier of {stated:.6g}. With this "
            f"multiplier, round {first.round} would have another cost than in the ledger: the "
            "checkpoint was changed; restore `checkpoints/` from a backup"
        )
    return stated


def _charged_multiplier(
    recipe: Recipe, sizes: Callable[[], Mapping[str, int]], first: Charge
) -> float | None:
    """The noise multiplier by which a row was charged; None if rows do not state it."""
    facts, charged = facts_of(recipe, 2 * recipe.training.batch_size), Cost.of(first.event)
    # rows of rounds that are one mechanism are increments
    if charging.of(facts).joint or charged.law != "gaussian":
        return None
    if facts.shares is not None:
        level = 1.0  # for every round and mechanism; only runs with shares have a second epsilon
    elif mechanisms.is_own(recipe.mechanism.name):
        return None
    else:
        layers = LayerTable.from_sizes(dict(sizes()))
        level = math.sqrt(recipe.mechanism.build().costs(layers, facts.rounds)[first.round - 1])
    return charged.figure * level * facts.moved
