"""The public facts of a run, derived from its recipe."""

from __future__ import annotations

from fedlgm import data
from fedlgm.extension.loader import is_object
from fedlgm.planning.facts import RunFacts
from simulations.config.unit import Settings

_OVERLAP = "conditional on nobody having {} at more than {} clients, at all of which together epsilon holds"
_HELD = {"example": "more than one example at a client, or examples", "client": "data"}


def facts_of(recipe: Settings, examples: int = 0) -> RunFacts:
    """The public facts of a run, whose noise multiplier is not yet calibrated.

    Args:
        recipe: the recipe.
        examples: number of training examples of all clients together, for unit "example" under
            central trust.

    Raises:
        ConfigError: the batch is larger than the data, if the server adds noise to steps.
    """
    privacy, (sampling, steps) = (
        recipe.privacy,
        recipe.protects.sampling_and_steps(recipe, examples),
    )
    overlap = recipe.federation.overlap or 1
    facts = RunFacts(
        0.0,
        sampling,
        recipe.relation,
        privacy.trust,
        recipe.federation.rounds,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        accountant=privacy.accountant,
        max_participations=privacy.max_participations,
        training=recipe.training.local,
        steps=steps,
        noise=recipe.noise,
        shares=recipe.shares,
        overlap=overlap,
    )
    return facts.assuming(_OVERLAP.format(_HELD[recipe.unit], overlap)) if overlap > 1 else facts


def published_examples(recipe: Settings) -> int | None:
    """Number of training examples as published or as the recipe states it; None if only the data
    show it.

    Example:
        >>> from simulations.config.recipe import load
        >>> published_examples(load("dp-sgd-digits")), published_examples(load("digits"))
        (1442, None)
    """
    section = recipe.data
    if is_object(section.name) or section.partition != "iid":
        return None
    return data.published_examples(section.name, section.train_images)
