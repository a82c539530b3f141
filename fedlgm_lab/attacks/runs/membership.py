"""`fedlgm attack mia` and `fedlgm attack lira`: membership in the training set of a federation."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.privacy.guarantee import Unit
from fedlgm_lab.attacks.lira import confidence_logits, likelihood_ratios, pooled
from fedlgm_lab.attacks.membership import MembershipResult, evaluate_scores
from fedlgm_lab.attacks.mia import output_scores
from fedlgm_lab.attacks.rmia import relative_ratios
from fedlgm_lab.attacks.runs.target import ClientPool, Images, Pool, Target, train
from simulations.progress import OnProgress
from simulations.runs.rows import FullRow, RunSummary

# number of models; when one of them is attacked, every example still has two shadow models that
# were trained with it and two that were not
_POOLED = 6


@dataclass(frozen=True, eq=False)
class Population:
    """Models and the members of their training sets.

    Attributes:
        pool: the examples and their units, each of which is a member or not.
        modules: the models; for a run, its own model comes first.
        membership: units on which each model was trained, bool [models, units].
        results: summaries of the federations, in the order of the models.
        run: whether the first model belongs to a finished run.
    """

    pool: Pool
    modules: list[nn.Module]
    membership: np.ndarray
    results: list[RunSummary]
    run: bool


def population(
    target: Target,
    models: int,
    *,
    examples: int | None = None,
    unit: Unit = "example",
    progress: OnProgress | None = None,
) -> Population:
    """Train federations of the target's recipe on random halves of its examples, or on random
    halves of clients among which these examples are divided.

    For a run, `models` shadow federations are trained on halves of its training and test sets, in
    addition to the run. For a recipe, `models` federations are trained in all. Each federation has
    its own cohorts, batches and noise. Federations come in pairs, and each pair divides the units.

    Args:
        target: the attacked recipe or run.
        models: number of federations.
        examples: largest number of the set's examples to use; default: all. Not for a run.
        unit: unit of membership. For a recipe the clients are twice as many as the recipe states,
            and each has half as many examples. For a run they are the run's clients and further
            clients that hold the test set.
        progress: called with (rounds done, total, description).

    Raises:
        ConfigError: a limit on a finished run's examples is given.
    """
    if target.folder is not None and examples is not None:
        raise ConfigError(
            "--examples chooses what a recipe's federations train on; a finished run has its own "
            "examples"
        )
    if examples is not None and examples < 20:
        raise ConfigError(f"--examples must be at least 20, got {examples}")
    assembly = target.assembly()
    images = Images.of(assembly.data.dataset)
    if unit == "example":
        pool = Pool.of(images, examples)
    elif target.folder is None:
        pool = ClientPool.of_recipe(images, target.recipe, examples)
    else:
        pool = ClientPool.of_run(images, target.recipe, assembly.data.partition)
    membership = pool.halves(models + models % 2, target.recipe.run.seed or 0)[:models]
    rounds = target.recipe.federation.rounds
    modules, results = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for index, members in enumerate(membership):

            def on_round(row: FullRow, index: int = index) -> None:
                if progress is not None:
                    progress(
                        index * rounds + row["round"],
                        models * rounds,
                        f"federation {index + 1} of {models}",
                    )

            recipe = target.twin(
                "shadow", str(index), evaluate_every=rounds, checkpoint_every=rounds
            )
            module, result = train(
                pool.federation(recipe, members), Path(scratch) / str(index), progress=on_round
            )
            modules.append(module)
            results.append(result)
    if target.folder is not None:
        modules.insert(
            0, target.folder.checkpoints.into(assembly.model.module(), assembly.model.layers)
        )
        results.insert(0, target.folder.verified_result())
        membership = np.concatenate([pool.trained[None], membership])
    return Population(pool, modules, membership, results, target.folder is not None)


def mia(people: Population) -> dict[str, MembershipResult]:
    """Attack the first model by its outputs, and return the results by attack."""
    members, pool = people.membership[0], people.pool
    scores = {
        name: pool.by_unit(example_scores)
        for name, example_scores in output_scores(people.modules[0], *pool.tensors()).items()
    }
    return {
        name: evaluate_scores(values[members], values[~members]) for name, values in scores.items()
    }


def require_enough(target: Target, models: int) -> None:
    """Raise ConfigError if the number of federations is odd, or too small for `lira`."""
    least, attacked = (_POOLED, "recipe") if target.folder is None else (4, "run")
    if models < least or models % 2:
        raise ConfigError(
            f"LiRA on a {attacked} needs an even number of federations, at least {least}, got "
            f"{models}"
        )


def lira(people: Population) -> dict[str, MembershipResult]:
    """Attack by LiRA and RMIA, each online and offline, and return the results by attack.

    For a run, its model is attacked. For a recipe, every federation is attacked, and the scores are
    pooled. A client's confidence is the mean confidence over its examples.
    """
    x, y = people.pool.tensors()
    scores = np.stack([confidence_logits(module, x, y) for module in people.modules])
    if not np.isfinite(scores).all():
        # models with too much noise overflow
        scores = np.nan_to_num(scores, nan=0.0, posinf=1e6, neginf=-1e6)
    scores, members = people.pool.by_unit(scores), people.membership[0]
    results = {}
    for name, attack in (("", likelihood_ratios), ("rmia ", relative_ratios)):
        for side in ("online", "offline"):
            variant = partial(attack, online=side == "online")
            if not people.run:
                results[name + side] = pooled(scores, people.membership, variant)
                continue
            ratios = variant(scores[0], scores[1:], people.membership[1:])
            results[name + side] = evaluate_scores(ratios[members], ratios[~members])
    return results


def overfit(module: nn.Module, people: Population) -> tuple[float, float]:
    """Measure a model's accuracy on members and on non-members; a difference reveals membership."""
    with torch.no_grad():
        (x, y), members = people.pool.tensors(), people.membership[0][people.pool.unit_of]
        right = (module(x).argmax(dim=1) == y).numpy()
    return float(right[members].mean()), float(right[~members].mean())
