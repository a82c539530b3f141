"""`fedlgm attack mia` and `fedlgm attack lira`: who was in the training set of a federation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedlgm.attacks.lira import confidence_logits, leave_one_out, likelihood_ratios, random_halves
from fedlgm.attacks.membership import MembershipResult, evaluate_scores
from fedlgm.attacks.mia import LayerAdversary, ShadowModel, attack_outputs
from fedlgm.errors import ConfigError
from simulations.attacks.target import Images, Pool, Target, module_of, train
from simulations.runs.rows import FullRow, RunSummary

_POOLED = 6  # two shadow models with and two without every example remain when one is attacked
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Population:
    """Models and who was in their training sets.

    Attributes:
        pool: the examples.
        modules: the models; with a run, the run's own comes first.
        membership: which example each model was trained on, bool [models, n].
        results: summaries of the federations, in the order of the models.
        run: whether the first model is a finished run's.
    """

    pool: Pool
    modules: list[nn.Module]
    membership: np.ndarray
    results: list[RunSummary]
    run: bool


def population(
    target: Target, models: int, *, examples: int | None = None, progress: OnProgress | None = None
) -> Population:
    """Train federations of the target's recipe on random halves of its examples.

    Against a run, `models` shadow federations are trained beside it, on halves of its training and test sets; against a
    recipe, `models` federations are trained in all. Cohorts, batches and noise differ from one to the next.

    Args:
        target: what is attacked.
        models: number of federations, even and at least 4.
        examples: at most so many of the set's examples are used; all by default. Not with a run.
        progress: called with (rounds done, rounds in all, what is being done).

    Raises:
        ConfigError: a number of models that is odd or too small, or a limit on a finished run's examples.
    """
    if target.folder is not None and examples is not None:
        raise ConfigError(
            "--examples chooses what a recipe's federations train on; a finished run has its own examples"
        )
    if examples is not None and examples < 20:
        raise ConfigError(f"--examples must be at least 20, got {examples}")
    assembly = target.assembly()
    pool = Pool.of(Images.of(assembly.dataset), examples)
    membership = random_halves(len(pool.y), models, seed=target.recipe.run.seed or 0)
    rounds = target.recipe.federation.rounds
    modules, results = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for index, members in enumerate(membership):

            def on_round(row: FullRow, index: int = index) -> None:
                if progress is not None:
                    progress(index * rounds + row["round"], models * rounds, f"federation {index + 1} of {models}")

            own = target.twin("shadow", str(index), evaluate_every=rounds, checkpoint_every=rounds)
            trained = train(pool.federation(own, members), Path(scratch) / str(index), progress=on_round)
            modules.append(trained.module)
            results.append(trained.result)
    if target.folder is not None:
        modules.insert(0, module_of(assembly, target.folder))
        results.insert(0, target.folder.result() or {})
        membership = np.concatenate([pool.trained[None], membership])
    return Population(pool, modules, membership, results, target.folder is not None)


@dataclass(frozen=True)
class MiaFindings:
    """What the attacks of `mia` found.

    Attributes:
        outputs: results by attack on the model's outputs.
        layers: results by layer.
        error_rates: the risk estimate of every layer.
    """

    outputs: dict[str, MembershipResult]
    layers: dict[str, MembershipResult]
    error_rates: dict[str, float]


def mia(people: Population) -> MiaFindings:
    """Output and layer attacks on the first model; the others fit the layer adversaries."""
    members, victim = people.membership[0], people.modules[0]
    inside, outside = people.pool.tensors(members), people.pool.tensors(~members)
    adversary = LayerAdversary(
        [
            ShadowModel(module, people.pool.tensors(row)[0], people.pool.tensors(~row)[0])
            for module, row in zip(people.modules[1:], people.membership[1:], strict=True)
        ]
    )
    return MiaFindings(
        attack_outputs(victim, inside, outside),
        adversary.attack(victim, inside[0], outside[0]),
        adversary.error_rates(),
    )


def require_pooled(target: Target, models: int) -> None:
    """Raise ConfigError for too few federations of a recipe for `lira`, where each is attacked with the others."""
    if target.folder is None and models < _POOLED:
        raise ConfigError(f"LiRA on a recipe attacks each federation with the others: train at least {_POOLED}")


def lira(people: Population) -> dict[str, MembershipResult]:
    """LiRA, "online" and "offline": on the run, or on every federation of a recipe in turn, pooled."""
    x, y = people.pool.tensors()
    scores = np.stack([confidence_logits(module, x, y) for module in people.modules])
    if not np.isfinite(scores).all():
        scores = np.nan_to_num(scores, nan=0.0, posinf=1e6, neginf=-1e6)  # models drowned in noise overflow
    found = {}
    for name, online in (("online", True), ("offline", False)):
        if not people.run:
            found[name] = leave_one_out(scores, people.membership, online=online)
            continue
        ratios = likelihood_ratios(scores[0], scores[1:], people.membership[1:], online=online)
        members = people.membership[0]
        found[name] = evaluate_scores(ratios[members], ratios[~members])
    return found


def overfit(module: nn.Module, people: Population) -> tuple[float, float]:
    """Accuracy of a model of the population on its members and on the others: their gap is what outputs leak."""
    with torch.no_grad():
        (x, y), members = people.pool.tensors(), people.membership[0]
        right = (module(x).argmax(dim=1) == y).numpy()
    return float(right[members].mean()), float(right[~members].mean())
