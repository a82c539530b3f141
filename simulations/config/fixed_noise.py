"""Recipes with a fixed noise multiplier. The epsilon that follows from the multiplier replaces a
stated budget.
"""

from __future__ import annotations

import math

from fedlgm.errors import ConfigError
from fedlgm.mechanisms.layerwise_gaussian import NoPrivacy
from fedlgm.mechanisms.method import Method
from fedlgm.planning import charging
from simulations.config.facts import facts_of, published_examples
from simulations.config.unit import Settings

_AGREE = 1e-4  # relative


def epsilon_of(recipe: Settings) -> float:
    """Epsilon of all rounds of a recipe at its `privacy.noise_multiplier`, for `privacy.delta`.

    Args:
        recipe: the recipe; its `privacy.epsilon` is not used.

    Raises:
        ConfigError: the recipe alone does not determine epsilon.

    Example:
        >>> from simulations.config.recipe import load
        >>> recipe = load("digits", ["privacy.epsilon=none", "privacy.noise_multiplier=2.0"])
        >>> recipe.privacy.epsilon == epsilon_of(recipe)
        True
    """
    # imports that workers do without
    from fedlgm.privacy.accounting import SMALLEST_MULTIPLIER, composed_epsilon

    noise_multiplier = recipe.privacy.noise_multiplier
    assert noise_multiplier is not None
    if noise_multiplier < SMALLEST_MULTIPLIER:
        raise ConfigError(
            f"privacy.noise_multiplier = {noise_multiplier:g} is below {SMALLEST_MULTIPLIER}, the "
            "least noise of a run: raise it"
        )
    examples = published_examples(recipe)
    if examples is None and recipe.protects.counts_examples(recipe):
        raise ConfigError(
            "privacy.noise_multiplier: the number of training examples is not known before the "
            "data are read: give privacy.epsilon instead, which `fedlgm calibrate "
            f"--noise-multiplier {noise_multiplier:g} --steps {recipe.federation.rounds} --delta "
            f"{recipe.privacy.delta:g} --accountant {recipe.privacy.accountant} --sampling-rate Q` "
            f"prints for Q = {recipe.training.batch_size} / (number of training examples)"
        )
    facts = facts_of(recipe, examples or 0).with_multiplier(noise_multiplier)
    events = charging.of(facts).run_events()
    epsilon = composed_epsilon(events, recipe.privacy.delta, facts.accountant)
    if not math.isfinite(epsilon):
        raise ConfigError(
            f"privacy.noise_multiplier = {noise_multiplier:g} gives no finite epsilon: raise it"
        )
    if epsilon == 0:
        raise ConfigError(
            f"privacy.noise_multiplier = {noise_multiplier:g} gives epsilon 0, which no budget "
            "states: lower it"
        )
    return epsilon


def require_agreement(recipe: Settings) -> None:
    """Raise ConfigError if a recipe states both a budget and a noise multiplier, and another
    epsilon follows from the multiplier.
    """
    follows, budget = epsilon_of(recipe), recipe.privacy
    if not math.isclose(follows, budget.epsilon, rel_tol=_AGREE):
        raise ConfigError(
            f"privacy.epsilon = {budget.epsilon:g} and privacy.noise_multiplier = "
            f"{budget.noise_multiplier:g} "
            f"are both given, but this noise gives epsilon {follows:.6g}: leave one out (--set "
            "privacy.epsilon=none)"
        )


def require_noise(recipe: Settings, method: Method) -> None:
    """Raise ConfigError if `privacy.noise_multiplier` is set and the method has other noise than
    this multiplier gives.
    """
    given, drawn = recipe.privacy.noise_multiplier, method.facts.noise_multiplier
    if isinstance(method.mechanism, NoPrivacy):
        return
    if given is not None and not math.isclose(given, drawn, rel_tol=_AGREE):
        raise ConfigError(
            f"privacy.noise_multiplier = {given:g}: {method.mechanism.name} or what the data have "
            f"already spent needs {drawn:.6g} for the same epsilon; give privacy.epsilon instead"
        )
