"""A recipe with public examples in place of its data, and the facts of its run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.recommend.public import (
    examples_of,
    of_public,
    outline_of,
    public_examples,
    refuse_private,
)
from simulations.arguments import resolve
from simulations.config.assembly import Assembly
from simulations.config.facts import facts_of
from simulations.config.overrides import Overrides
from simulations.config.recipe import Recipe


@dataclass(frozen=True)
class Setting:
    """Settings that are fixed before the computation.

    Attributes:
        assembly: objects of the recipe over public examples.
        facts: the run's facts, with the noise multiplier that its budget requires.
        share: mean number of examples of a client.
        assumed: whether the number of examples is unknown and set to one batch.
    """

    assembly: Assembly
    facts: RunFacts
    share: float
    assumed: bool


def setting_of(
    recipe: Any,
    model: Any,
    data: Any,
    public: Any,
    task: Any,
    overrides: Overrides,
    examples: int | None,
) -> tuple[Setting, str]:
    """Build the recipe's objects over public examples only.

    Raises:
        ConfigError: the recipe's mechanism adds no noise.
    """
    outline, clients = outline_of(data)
    given = {"task": task, "model": model, "data": data if outline is None else outline}
    counted = {} if clients is None else {"federation.clients": clients}
    parsed, own = resolve(recipe, given, counted, overrides)
    if not mechanisms.is_private(parsed.mechanism.name):
        raise ConfigError(
            f"mechanism.name: {parsed.mechanism.name} adds no noise, so nothing can be recommended"
        )
    refuse_private(parsed, None if outline is None else data, public)
    own = replace(own, data=None)
    dataset, source = public_examples(parsed, Assembly(parsed, own).data.task, public, outline)
    assembly = Assembly(of_public(parsed), replace(own, data=dataset))
    assembly.model.check()
    # whether the clients hold the data set that the recipe names
    ours = data is None and (recipe is not None or public is None or isinstance(public, str))
    total = examples if examples is not None else examples_of(parsed) if ours else None
    share = (
        total / parsed.federation.clients
        if total is not None
        else float(parsed.training.batch_size)
    )
    facts = _facts(parsed, LayerTable.from_module(assembly.model.module()), total)
    return Setting(assembly, facts, share, total is None), source


def _facts(recipe: Recipe, layers: LayerTable, examples: int | None) -> RunFacts:
    """Compute the run's facts, with the noise multiplier that its budget requires."""
    unit = recipe.protects
    if unit.counts_examples(recipe) and examples is None:
        raise ConfigError(
            "examples: a step's sampling rate is batch_size over the number of training examples: "
            "pass that number"
        )
    facts = facts_of(recipe, (examples or 0) if unit.counts_examples(recipe) else 0)
    flat = mechanisms.get(unit.flat)
    return unit.calibrate(flat, flat.table(layers), facts).facts
